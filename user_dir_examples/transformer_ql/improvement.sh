#!/usr/bin/env bash
# A row of Table 2 or 3: test a Transformer-XL and a Transformer-QL at the same lengths and compare their perplexities.
#
#   improvement.sh XL_CHECKPOINT QL_CHECKPOINT DATA_BIN N_S N_M [MORE FLAGS OF FAIRSEQ-EVAL-LM]
#   improvement.sh checkpoints/transformer_xl_wt103/checkpoint_best.pt checkpoints/transformer_ql_wt103/checkpoint_best.pt data/wikitext103-words/bin 16 16
#
# The improvement is Transformer-XL's perplexity less Transformer-QL's, the relative one its share of Transformer-XL's
# (Section 3.2), so the better Transformer-QL is, the greater.
set -euo pipefail

if [ $# -lt 5 ]; then
    echo "usage: $0 XL_CHECKPOINT QL_CHECKPOINT DATA_BIN N_S N_M [MORE FLAGS]" >&2
    exit 2
fi
xl=$1 ql=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)

perplexity() {
    "$here/evaluate.sh" "$@" 2>&1 | sed -n 's/.*Perplexity: *\([0-9.]*\).*/\1/p'
}

# Assigned first: a failure inside of awk's arguments would go unnoticed.
xl=$(perplexity "$xl" "$@")
ql=$(perplexity "$ql" "$@")
echo "| n_s/n_m | Transformer-QL | Transformer-XL | improvement | relative |"
echo "| --- | --- | --- | --- | --- |"
awk -v n="$2/$3" -v xl="$xl" -v ql="$ql" \
    'BEGIN { printf "| %s | %.2f | %.2f | %.2f | %+.2f%% |\n", n, ql, xl, xl - ql, 100 * (xl - ql) / xl }'
