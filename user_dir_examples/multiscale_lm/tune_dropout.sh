#!/usr/bin/env bash
# Train a model with several probabilities of dropout and print the validation perplexity of each. The paper tuned those of
# its WikiText-103 models from 0.1 to 0.5 in steps of 0.05 (Section 4.2); "all" tries these nine values.
#
#   tune_dropout.sh ARCH DATA_BIN all|"RATES ..." [--small] [MORE FLAGS OF FAIRSEQ-TRAIN]
#   tune_dropout.sh multiscale_topdown_wt103_6_12 data/wikitext103/bin "0.3" --small
#
# One probability is used everywhere, as in the paper's other models: behind embeddings and blocks, on attention scores
# and on activations. Runs go to checkpoints/ARCH-dropout-P, and one that is done is not trained again.
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "usage: $0 ARCH DATA_BIN all|\"RATES ...\" [--small] [MORE FLAGS]" >&2
    exit 2
fi
arch=$1 data=$2 rates=$3
shift 3
[ "$rates" = all ] && rates="0.1 0.15 0.2 0.25 0.3 0.35 0.4 0.45 0.5"
here=$(cd "$(dirname "$0")" && pwd)
windows=(--tokens-per-sample 512 --context-window 256)
checkpoint=checkpoint_best.pt
if [ "${1:-}" = --small ]; then
    windows=(--tokens-per-sample 128 --context-window 64)
    checkpoint=checkpoint_last.pt
fi

echo "| dropout | validation perplexity |"
echo "| --- | --- |"
for rate in $rates; do
    run="checkpoints/$arch-dropout-$rate"
    mkdir -p "$run"
    if ! grep -qs "done training" "$run/log"; then
        "$here/train.sh" "$arch" "$data" "$@" --dropout "$rate" --attention-dropout "$rate" \
            --activation-dropout "$rate" --save-dir "$run" > "$run/log" 2>&1 < /dev/null || {
            echo "$0: training failed, see $run/log" >&2
            exit 1
        }
    fi
    found=$("$here/evaluate.sh" "$run/$checkpoint" "$data" --gen-subset valid "${windows[@]}" --post-process '@@ ' 2>&1 |
        sed -n 's/.*Perplexity: *\([0-9.]*\).*/\1/p')
    echo "| $rate | $found |"
done
