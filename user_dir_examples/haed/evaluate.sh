#!/usr/bin/env bash
# Evaluate one of the HAED paper's models on the test split: "Loss (base 2)" is its bits per input token.
#
#   evaluate.sh CHECKPOINT DATA_BIN characters|pixels [MORE FLAGS OF FAIRSEQ-EVAL-LM]
#   evaluate.sh checkpoints/characters_haed/checkpoint_best.pt data/wikitext103-chars/bin characters
#   evaluate.sh checkpoints/pixels_haed/checkpoint_best.pt data/imagenet32/bin pixels --fp16
#
# Rows are those of training: 1,344 characters, each row by itself, or one image. --context-window N gives each row
# of characters N characters of preceding context, out of the 1,344. The first phase, *_iem, has no decoder to evaluate.
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "usage: $0 CHECKPOINT DATA_BIN characters|pixels [MORE FLAGS]" >&2
    exit 2
fi
checkpoint=$1 data=$2 kind=$3
shift 3
case $kind in
    characters) rows=(--tokens-per-sample 1344 --sample-break-mode none) ;;
    pixels) rows=(--tokens-per-sample 3072 --sample-break-mode eos) ;;
    *) echo "$0: the third argument must be characters or pixels: got $kind" >&2; exit 2 ;;
esac

exec fairseq-eval-lm "$data" \
    --user-dir "$(fairseq-ms user-dir)" --task language_modeling --path "$checkpoint" \
    --gen-subset test "${rows[@]}" --batch-size 8 \
    "$@"
