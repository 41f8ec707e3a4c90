#!/usr/bin/env bash
# Train the four kinds of models, small and with about equal memory, for equally many updates, and print a table.
#
#   compare.sh DATA_BIN OUT UPDATES [MORE FLAGS OF FAIRSEQ-TRAIN]
#   compare.sh data/wikitext2/bin runs/compare 3000
#
# Two more rows have no coarse scales: vanilla5 is top-down's layers at 1x alone, window16 is retina's near window
# alone. Perplexities are per word, over windows of 256 tokens with a stride of 192; the memory is what a training
# step of 4 x 256 tokens keeps for backward. A run that is there already is not trained again.
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "usage: $0 DATA_BIN OUT UPDATES [MORE FLAGS]" >&2
    exit 2
fi
data=$1 out=$2 updates=$3
shift 3
plugin=$(fairseq-ms user-dir)
mkdir -p "$out"

flags_of() {
    case $1 in
        vanilla6) echo --arch vanilla_lm --decoder-layers 6 ;;
        topdown) echo --arch multiscale_topdown --scale-layers 16x=1,4x=3,1x=5 ;;
        bottomup) echo --arch multiscale_bottomup --scale-layers 16x=2,4x=3,1x=4 ;;
        retina) echo --arch retina_lm --decoder-layers 6 --scale-heads 1x=2,4x=1,16x=1 \
            --scale-windows 1x=0:16,4x=16:128,16x=128:256 ;;
        vanilla5) echo --arch vanilla_lm --decoder-layers 5 ;;
        window16) echo --arch vanilla_lm --decoder-layers 6 --scale-windows 1x=0:16 ;;
    esac
}

train() {
    local name=$1
    shift
    # shellcheck disable=SC2046
    fairseq-train "$data" --user-dir "$plugin" --task language_modeling $(flags_of "$name") \
        --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --decoder-attention-heads 4 \
        --share-decoder-input-output-embed --tokens-per-sample 256 --batch-size 4 \
        --optimizer adam --lr 0.003 --lr-scheduler cosine --warmup-updates 50 --clip-norm 1.0 \
        --max-update "$updates" --seed 1 --disable-validation --no-epoch-checkpoints \
        --save-dir "$out/$name" --log-format simple --log-interval 50 "$@" > "$out/$name.log" 2>&1 || {
        echo "$0: training failed, see $out/$name.log" >&2
        exit 1
    }
}

perplexity() {
    fairseq-ms perplexity "$out/$1/checkpoint_last.pt" --gen-subset "$2" --tokens-per-sample 256 --context-window 64 \
        --batch-size 16 | tee "$out/$1.$2.log" | sed -n 's/^word perplexity *\([0-9.]*\).*/\1/p'
}

kept() {
    fairseq-ms memory --path "$out/$1/checkpoint_last.pt" --batch-size 4 |
        sed -n 's/^kept for backward, measured:.*, \(.*\) a scored target/\1/p'
}

echo "| model | kept for backward, a target | valid | test |"
echo "| --- | --- | --- | --- |"
for name in vanilla6 topdown bottomup retina vanilla5 window16; do
    grep -qs "done training" "$out/$name.log" || train "$name" "$@"
    # Assigned first: a failure inside of echo would leave an empty cell and go on.
    memory=$(kept "$name")
    valid=$(perplexity "$name" valid)
    test=$(perplexity "$name" test)
    echo "| $name | $memory | $valid | $test |"
done
