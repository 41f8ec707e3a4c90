#!/usr/bin/env bash
# Train one of the Transformer-QL paper's models with Appendix E's hyper-parameters.
#
#   train.sh ARCH DATA_BIN [MORE FLAGS OF FAIRSEQ-TRAIN]
#   train.sh transformer_ql_simplebooks2 data-bin/simplebooks-2 --fp16
#
# ARCH is transformer_xl_*, compressive_transformer_* or transformer_ql_* with one of the endings below; a batch
# holds the paper's number of tokens, as STREAMS parallel streams of one segment each. Divide STREAMS by the
# number of GPUs with --batch-size.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 ARCH DATA_BIN [MORE FLAGS]" >&2
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
    *_simplebooks2 | *_simplebooks2_ms) criterion=cross_entropy ;;
    *)                                  criterion=adaptive_loss ;;
esac

exec fairseq-train "$data" \
    --user-dir "$(fairseq-ms user-dir)" --task streaming_language_modeling --arch "$arch" \
    --tokens-per-sample "$segment" --batch-size "$((tokens / segment))" --num-workers 2 \
    --criterion "$criterion" --ddp-backend legacy_ddp \
    --optimizer adam --lr "$lr" --lr-scheduler cosine --min-lr "$min_lr" --warmup-updates 0 \
    --clip-norm "$clip" --max-update "$updates" \
    --save-dir "checkpoints/$arch" --no-epoch-checkpoints --log-interval 100 --seed 1 \
    "$@"
