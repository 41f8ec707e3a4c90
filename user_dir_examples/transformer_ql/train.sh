#!/usr/bin/env bash
# Train one of the Transformer-QL paper's models with Appendix E's hyper-parameters.
#
#   train.sh ARCH DATA_BIN [--small] [MORE FLAGS OF FAIRSEQ-TRAIN]
#   train.sh transformer_ql_simplebooks2 data/simplebooks2/bin --fp16
#   train.sh transformer_ql_wt103 data/wikitext103-words/bin --small
#
# ARCH is transformer_xl_*, compressive_transformer_* or transformer_ql_* with one of the endings below; a batch
# holds the paper's number of tokens, as STREAMS parallel streams of one segment each.
# --small keeps the layers, scales and lengths of the model, takes 64 for its width and 100 updates of 16 streams: a
# minute on a laptop, with any dictionary of more than 6,000 words. Its loss begins near log2 of the dictionary's size
# and falls by about 4 bits; it says nothing about the paper's.
#
# With 8 GPUs of one machine, and with 2 such machines under Slurm, each GPU reads its share of the streams:
#   torchrun --nproc-per-node 8 $(which fairseq-train) ... --batch-size 64 --fp16
#   sbatch -N 2 --ntasks-per-node 8 --gpus-per-node 8 --wrap \
#     "srun train.sh ARCH DATA_BIN --batch-size 32 --fp16 --distributed-world-size 16 --distributed-port 29500"
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 ARCH DATA_BIN [--small] [MORE FLAGS]" >&2
    exit 2
fi
arch=$1 data=$2
shift 2

# Tokens in a batch, updates, first and last learning rate, gradient norm.
case $arch in
    *_simplebooks2 | *_simplebooks2_ms)   tokens=1024 updates=60000  lr=0.00025 min_lr=0.000001  clip=0.25 ;;
    *_simplebooks92 | *_simplebooks92_ms) tokens=4096 updates=250000 lr=0.0001  min_lr=0.0000004 clip=0.1 ;;
    *_wt103 | *_wt103_ms)                 tokens=8192 updates=350000 lr=0.0001  min_lr=0.0000004 clip=0.1 ;;
    *_wt103_d512)                         tokens=8192 updates=350000 lr=0.0005  min_lr=0.000002  clip=0.1 ;;
    *_wt103_d1024)                        tokens=8192 updates=350000 lr=0.00025 min_lr=0.000001  clip=0.1 ;;
    *) echo "$0: ARCH must be a preset of the Transformer-QL paper: got $arch" >&2; exit 2 ;;
esac
case $arch in
    *_simplebooks2_ms)                                       segment=16 ;;
    *_simplebooks92_ms)                                      segment=64 ;;
    *_wt103_ms)                                              segment=128 ;;
    compressive_transformer_wt103)                           segment=8 ;;
    compressive_transformer_*)                               segment=4 ;;
    *_wt103*)                                                segment=16 ;;
    *)                                                       segment=8 ;;
esac
case $arch in
    *_simplebooks2 | *_simplebooks2_ms) criterion=(--criterion linear_cross_entropy) cutoffs=() ;;
    # Bands without a target have no gradient, for which fairseq's default backend would wait.
    *)                                  criterion=(--criterion adaptive_loss --ddp-backend legacy_ddp)
        cutoffs=(--adaptive-input-cutoff 2000,6000 --adaptive-softmax-cutoff 2000,6000) ;;
esac
if [ "${1:-}" = --small ]; then
    shift
    size=(--decoder-embed-dim 64 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4 --attention-head-dim 16
        "${cutoffs[@]}"
        --batch-size 16 --max-update 100 --lr 0.003 --log-interval 20 --disable-validation)
else
    size=(--batch-size "$((tokens / segment))" --max-update "$updates" --lr "$lr" --min-lr "$min_lr"
        --log-interval 100)
fi

exec fairseq-train "$data" \
    --user-dir "$(fairseq-ms user-dir)" --task streaming_language_modeling --arch "$arch" \
    --tokens-per-sample "$segment" --num-workers 2 "${criterion[@]}" \
    --optimizer adam --lr-scheduler cosine --warmup-updates 0 --clip-norm "$clip" "${size[@]}" \
    --save-dir "checkpoints/$arch" --no-epoch-checkpoints --seed 1 \
    "$@"
