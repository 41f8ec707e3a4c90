#!/usr/bin/env bash
# The multi-scale paper's Figures 4 to 6, Tables 5 and 6 and the last block of Table 4, for trained models side by side.
#
#   analyse.sh DATA_BIN OUT [LABEL=]CHECKPOINT ...
#   analyse.sh data/bookcorpus/bin results vanilla=checkpoints/vanilla_lm_books_14/checkpoint_best.pt checkpoints/retina_lm_books_12_8_256_512/checkpoint_best.pt
#
# On models of train.sh --small, which have 128 positions, set SAMPLES="--prefix-size 32 --length 64". Table 5's n-gram
# perplexity needs NGRAM=FILE, an ARPA or binary file of kenlm, and its GPT-2 perplexity HF=FOLDER, a local model.
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "usage: $0 DATA_BIN OUT [LABEL=]CHECKPOINT ..." >&2
    exit 2
fi
data=$1 out=$2
shift 2
mkdir -p "$out"
judges=(${NGRAM:+--ngram-lm "$NGRAM"} ${HF:+--hf-lm "$HF"})

# Figures 5 and 6, Figure 4, the last block of Table 4, Table 6, Table 5
fairseq-ms nll-by-frequency "$@" --data "$data" --json "$out/figure5.json" --png "$out/figure5.png"
fairseq-ms context-shuffle "$@" --data "$data" --json "$out/figure4.json" --png "$out/figure4.png"
fairseq-ms context-window "$@" --data "$data" --json "$out/context.json" --png "$out/context.png"
fairseq-ms neighbors "$@" --data "$data" --remove-bpe --json "$out/table6.json"
fairseq-ms sample-metrics "$@" --data "$data" --remove-bpe ${SAMPLES:-} "${judges[@]}" --json "$out/table5.json"
