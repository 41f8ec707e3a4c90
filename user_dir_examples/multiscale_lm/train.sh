#!/usr/bin/env bash
# Train one of the multi-scale paper's models as in its Section 4.2: batches of 256 x 512 tokens, Adam, 2.5e-4 after
# 40,000 updates of warm-up, then a cosine over a million; in mixed precision, where there is a GPU for it.
#
#   train.sh ARCH DATA_BIN [--small] [MORE FLAGS OF FAIRSEQ-TRAIN]
#   train.sh multiscale_topdown_books_7_7_8_8 data/bookcorpus/bin
#   train.sh retina_lm_wt103_16 data/wikitext103/bin --small
#
# ARCH is a preset: a row of Table 2 (*_ccnews_*), 3 (*_wt103_*), 4, 5 or 8 (*_books_*), or 7 (coarse_lm_wt103_*).
# --small keeps the shape of the model and takes an eighth of its width and 100 updates of 2 x 128 tokens: minutes on a
# laptop. Its loss begins near log2 of the dictionary's size and falls by 2 to 4 bits; it says nothing about the paper's.
#
# With 8 GPUs of one machine, and with 4 such machines under Slurm (256 rows are 8 x 8 x 4 and 32 x 8 x 1):
#   torchrun --nproc-per-node 8 $(which fairseq-train) ... --batch-size 8 --update-freq 4 --fp16
#   sbatch -N 4 --ntasks-per-node 8 --gpus-per-node 8 --wrap \
#     "srun train.sh ARCH DATA_BIN --batch-size 8 --update-freq 1 --fp16 --distributed-world-size 32 --distributed-port 29500"
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 ARCH DATA_BIN [--small] [MORE FLAGS]" >&2
    exit 2
fi
arch=$1 data=$2
shift 2
case $arch in
    coarse_lm_*) criterion=bag_of_words ;;
    vanilla_lm_* | retina_lm_* | multiscale_topdown_* | multiscale_bottomup_*) criterion=linear_cross_entropy ;;
    *) echo "$0: ARCH must be a preset of the multi-scale paper: got $arch" >&2; exit 2 ;;
esac
if [ "${1:-}" = --small ]; then
    shift
    size=(--tokens-per-sample 128 --batch-size 2 --update-freq 1 --max-update 100 --warmup-updates 20 --lr 0.001
        --decoder-embed-dim 96 --decoder-ffn-embed-dim 384 --decoder-attention-heads 12 --log-interval 20
        --share-decoder-input-output-embed --disable-validation)
else
    size=(--tokens-per-sample 512 --batch-size 32 --update-freq 8 --max-update 1040000 --warmup-updates 40000
        --lr 0.00025 --log-interval 100)
fi
# "All models were trained with mixed precision" (Section 4.2). PRECISION=float32 train.sh ... does without.
precision=()
if [[ "${PRECISION:-fp16} $*" != float32* && " $* " != *" --cpu "* && " $* " != *" --bf16 "* ]] &&
    python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    precision=(--fp16)
fi

exec fairseq-train "$data" \
    --user-dir "$(fairseq-ms user-dir)" --task language_modeling --arch "$arch" --criterion "$criterion" \
    --optimizer adam --lr-scheduler cosine "${size[@]}" "${precision[@]}" \
    --save-dir "checkpoints/$arch" --no-epoch-checkpoints --num-workers 2 --seed 1 \
    "$@"
