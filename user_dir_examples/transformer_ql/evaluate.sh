#!/usr/bin/env bash
# Test a trained model at the lengths of the paper's tables, which need not be those of its training.
#
#   evaluate.sh CHECKPOINT DATA_BIN N_S N_M [N_CM] [MORE FLAGS OF FAIRSEQ-EVAL-LM]
#   evaluate.sh checkpoints/transformer_ql_simplebooks2/checkpoint_best.pt data/simplebooks2/bin 4 12
#
# N_CM, the length of the compressed memory, is for compressive_transformer. The perplexity does not depend on
# --batch-size, which is the number of streams that are read side by side.
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: $0 CHECKPOINT DATA_BIN N_S N_M [N_CM] [MORE FLAGS]" >&2
    exit 2
fi
checkpoint=$1 data=$2 segment=$3 memory=$4
shift 4
overrides="'mem_len': $memory"
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    overrides="$overrides, 'compressed_mem_len': $1"
    shift
fi

exec fairseq-eval-lm "$data" \
    --user-dir "$(fairseq-ms user-dir)" --task streaming_language_modeling --path "$checkpoint" \
    --gen-subset test --tokens-per-sample "$segment" --model-overrides "{$overrides}" --batch-size 32 \
    "$@"
