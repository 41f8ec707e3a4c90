#!/usr/bin/env bash
# Figures 2 and 3 of the HAED paper: train a model for each number of units in the encoder or the decoder, one epoch
# each, print its bits per input token on the test split, and draw validation losses over units and over time.
#
#   sweep.sh encoder|decoder characters|pixels DATA_BIN "UNITS ..." [--small] [MORE SETTINGS OF FAIRSEQ-HYDRA-TRAIN]
#   sweep.sh decoder characters data/wikitext103-chars/bin "128" --small
#
# encoder: an LSTM encoder of so many units under a transformer, and "mlp", the cross of Figure 2. decoder: HAED with an
# LSTM decoder of so many units. Runs go to checkpoints/sweep-*, and one that is done is not trained again; the figures
# are checkpoints/sweep-*.png (of training losses with --small, which does not validate). How much of a step the decoder
# takes (Figure 3, c) is what `fairseq-ms bench haed-parts` measures.
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: $0 encoder|decoder characters|pixels DATA_BIN \"UNITS ...\" [--small] [MORE SETTINGS]" >&2
    exit 2
fi
part=$1 kind=$2 data=$3 sizes=$4
shift 4
case $part in
    encoder) model=hred_transformer ;;
    decoder) model=haed ;;
    *) echo "$0: the first argument must be encoder or decoder: got $part" >&2; exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
best=checkpoint_best.pt subset=valid logs=()
[ "${1:-}" = --small ] && best=checkpoint_last.pt subset=train

echo "| units of the $part | bits per token |"
echo "| --- | --- |"
for units in $sizes mlp; do
    [ "$part $units" = "decoder mlp" ] && continue
    run="$PWD/checkpoints/sweep-$part-$kind-$units"
    mkdir -p "$run"
    name=$kind"_"$model more=("model.${part}_units=$units")
    [ "$units" = mlp ] && name=$kind"_haed" more=()
    if ! grep -qs "done training" "$run/log"; then
        "$here/train.sh" "$name" "$data" "$@" "${more[@]}" "checkpoint.save_dir=$run" > "$run/log" 2>&1 < /dev/null || {
            echo "$0: training failed, see $run/log" >&2
            exit 1
        }
    fi
    bits=$("$here/evaluate.sh" "$run/$best" "$data" "$kind" 2>&1 | sed -n 's/.*Loss (base 2): *\([0-9.]*\).*/\1/p')
    echo "| $units | $bits |"
    logs+=("$units=$run/log")
done
for over in label hours; do
    fairseq-ms plot curves "${logs[@]}" --over "$over" --gen-subset "$subset" \
        --png "$PWD/checkpoints/sweep-$part-$kind-$over.png" > /dev/null
done
