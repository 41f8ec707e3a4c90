#!/usr/bin/env bash
# Table 1 in small: train the four models of the Transformer-QL paper for equally many updates and test each at the
# lengths of the table, printing perplexities as the rows of a Markdown table.
#
#   compare.sh DATA_BIN OUT UPDATES [MORE FLAGS OF FAIRSEQ-TRAIN]
#   compare.sh data/simplebooks2/bin runs/table1 3000
#
# The models are the presets *_simplebooks2 (8 layers of 256, pre-LN; Appendix E), trained at the paper's segments and
# memories on 32 streams of 8 tokens an update. A run that is there already is not trained again.
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "usage: $0 DATA_BIN OUT UPDATES [MORE FLAGS]" >&2
    exit 2
fi
data=$1 out=$2 updates=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"

failed() {
    echo "$0: failed, see $1" >&2
    exit 1
}

# The same number of tokens an update for every length of a segment.
streams_of() {
    case $1 in
        compressive_transformer_*) echo 64 ;;
        *_ms) echo 16 ;;
        *) echo 32 ;;
    esac
}

train() {
    local arch=$1
    shift
    "$here/train.sh" "$arch" "$data" --batch-size "$(streams_of "$arch")" --max-update "$updates" --lr 0.0005 \
        --warmup-updates 100 --disable-validation --log-format simple --save-dir "$out/$arch" "$@" > "$out/$arch.log" 2>&1 < /dev/null || failed "$out/$arch.log"
}

perplexity() {
    local arch=$1
    shift
    "$here/evaluate.sh" "$out/$arch/checkpoint_last.pt" "$data" "$@" 2>&1 | tee "$out/$arch.$1-$2.log" |
        sed -n 's/.*Perplexity: *\([0-9.]*\).*/\1/p' || failed "$out/$arch.$1-$2.log"
}

echo "| model | trained at | window 16 | window 32 |"
echo "| --- | --- | --- | --- |"
while read -r arch title trained short long; do
    grep -qs "done training" "$out/$arch.log" || train "$arch" "$@"
    # Assigned first: a failure inside of echo would leave an empty cell and go on.
    # shellcheck disable=SC2086
    narrow=$(perplexity "$arch" ${short//\// })
    # shellcheck disable=SC2086
    wide=$(perplexity "$arch" ${long//\// })
    echo "| ${title//_/ } | $trained | $narrow | $wide |"
done << 'MODELS'
transformer_xl_simplebooks2 Transformer-XL 8/8 4/12 8/24
compressive_transformer_simplebooks2 Compressive_Transformer 4/6/6 4/6/6 8/12/12
transformer_ql_simplebooks2 Transformer-QL 8/8 4/12 8/24
transformer_ql_simplebooks2_ms MS-Transformer 16/0 16/0 32/0
MODELS
