#!/usr/bin/env bash
# Test a trained model as the multi-scale paper does: windows of 512 tokens with a stride of 256 (Section 4.1).
#
#   evaluate.sh CHECKPOINT DATA_BIN [MORE FLAGS OF FAIRSEQ-EVAL-LM]
#   evaluate.sh checkpoints/multiscale_topdown_books_7_7_8_8/checkpoint_best.pt data/bookcorpus/bin
#   evaluate.sh checkpoints/retina_lm_wt103_16/checkpoint_best.pt data/wikitext103/bin
#
# For a model of train.sh --small, add --tokens-per-sample 128 --context-window 64. Perplexities are of
# subwords. Those of words, as in Table 3, are printed by fairseq-ms perplexity CHECKPOINT: fairseq's --post-process '@@ '
# counts a word twice that a window cuts.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 CHECKPOINT DATA_BIN [MORE FLAGS]" >&2
    exit 2
fi
checkpoint=$1 data=$2
shift 2

exec fairseq-eval-lm "$data" \
    --user-dir "$(fairseq-ms user-dir)" --path "$checkpoint" --gen-subset test \
    --tokens-per-sample 512 --context-window 256 --batch-size 16 \
    "$@"
