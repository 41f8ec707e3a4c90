"""The papers' claims that the runs test, as data, and the rule that gives the verdicts of docs/claims.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]

# Bits per token: more than the tests of any two seeds of one run have differed by so far, 0.045.
MARGIN = 0.05


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper about two models, and the two runs that test it.

    Attributes:
        place: where the paper has it
        words: the paper's own, or what its table shows, in brackets
        paper: the paper's numbers
        one: part/run
        relation: of the loss of `one` to that of `other`, if the claim holds: "<", "<=" (at most the margin above), "="
            or ">"
        other: part/run
        measure: a column of the runs' tests, or "last valid"
        other_measure: of `other`, where it is not the same
    """

    place: str
    words: str
    paper: str
    one: str
    relation: str
    other: str
    measure: str = "test"
    other_measure: str | None = None


# Over all novels where these runs are done. Over a fifth, each model has the one of two recipes that suits it better.
MULTISCALE = [
    Claim(
        "Section 5.1",
        "“the multi-scale transformer achieves lower perplexity for the same memory usage”",
        "top-down 2,2,11,11 16.12 (22.1 GB), vanilla 14 16.54 (23.8 GB)",
        *("multiscale_long/topdown_coarse", "<", "multiscale_long/vanilla6"),
    ),
    Claim(
        "Table 3",
        "“either the same perplexity as strong baselines, while using less memory”, bottom-up",
        "bottom-up 5,10 26.8 (21.8 GB), vanilla 16 25.9 (26.9 GB)",
        *("multiscale_small/bottomup", "<=", "multiscale_fast/vanilla6"),
    ),
    Claim(
        "Section 5.3",
        "“the best layer allocation places more layers at the finer scales”",
        "1,1,12,12 15.95, 16,12,6,1 22.14",
        *("multiscale_fast/topdown_even", "<", "multiscale_fast/topdown_coarse"),
    ),
    Claim(
        "Section 5.3",
        "“our Retina model is able to improve over a model that looks at all 512 words”",
        "retina 16.81, vanilla 12 16.95",
        *("multiscale_long/retina", "<", "multiscale_long/vanilla6"),
    ),
    Claim(
        "Section 5.3",
        "“the baseline model only mildly deteriorates when reducing the size of the context”",
        "window of 8 20.19, of 512 16.95",
        *("multiscale_fast/window8", ">", "multiscale_fast/vanilla6"),
    ),
]

TRANSFORMER_QL = [
    Claim(
        "Section 3.1",
        "“Transformer-XL performs worst among all three”: behind Transformer-QL",
        "Transformer-QL 18.78, Transformer-XL 20.15",
        *("streaming/ql", "<", "streaming/xl", "window 16"),
    ),
    Claim(
        "Section 3.1",
        "the same: behind the Compressive Transformer",
        "Compressive Transformer 19.67, Transformer-XL 20.15",
        *("streaming/compressive", "<", "streaming/xl", "window 16"),
    ),
    Claim(
        "Section 3.1",
        "“similarly or significantly better than Compressive Transformer”",
        "Transformer-QL 18.78, Compressive Transformer 19.67",
        *("streaming/ql", "<=", "streaming/compressive", "window 16"),
    ),
    Claim(
        "Table 1",
        "(twice the window helps, Transformer-QL)",
        "window 32 18.56, window 16 18.78",
        *("streaming/ql", "<", "streaming/ql", "window 32", "window 16"),
    ),
    Claim(
        "Section 3.2",
        "“performs relatively worse for small model dimension”: behind Transformer-XL on plenty of text",
        "512-wide: Transformer-QL 33.32, Transformer-XL 32.68",
        *("plenty/ql", ">", "plenty/xl", "window 16"),
    ),
    Claim(
        "Section 2.3",
        "“layers in the lower scales get over-fitted”, which droppath alleviates",
        "",
        *("streaming/ql", "<", "streaming/ql_no_droppath", "last valid"),
    ),
    Claim(
        "Appendix D",
        "“widely bitten by Transformer-QL”: the MS-Transformer, without memory",
        "Transformer-QL 18.92, MS-Transformer 25.13",
        *("streaming/ql", "<", "streaming/ms", "window 16"),
    ),
]

HAED = [
    Claim(
        "Table 1",
        "“the HRED with a Transformer considerably outperforms the original model”",
        "with transformer 1.37, HRED 1.52",
        *("hierarchical/hred_transformer", "<", "hierarchical/hred"),
    ),
    Claim(
        "Section 4.1.1",
        "“there is no further benefit in making the encoder larger”",
        "Figure 2",
        *("hierarchical/encoder64", "=", "hierarchical/hred_transformer"),
    ),
    Claim(
        "Section 3.1",
        "“replacing it with an MLP significantly accelerates the encoding without any decrease in performance”",
        "Figure 2",
        *("hierarchical/haed", "<=", "hierarchical/hred_transformer"),
    ),
    Claim(
        "Section 4.1.2",
        "“improvement on the loss as we increase the decoder size”",
        "Figure 3",
        *("hierarchical/haed", "<", "hierarchical/decoder256"),
    ),
    Claim(
        "Section 4.2",
        "“our auxiliary loss improves the performance of the model, even when pre-training time is taken into account”",
        "Figure 4",
        *("hierarchical/finetune", "<", "hierarchical/end_to_end_as_long"),
    ),
]

CLAIMS = {"Multi-scale Transformer LMs": MULTISCALE, "Transformer-QL": TRANSFORMER_QL, "HAED": HAED}


def of_run(records: Sequence[Record], run: str) -> list[Record]:
    """The records of a part/run, a seed each."""
    return [record for record in records if record["job"].rpartition("/")[0] == run]


def measured(records: Sequence[Record], run: str, measure: str) -> list[float]:
    """A run's perplexities, or HAED's bits per character, a seed each; none where it has not run."""
    found = of_run(records, run)
    if measure != "last valid":
        return [record["tests"][measure] for record in found if measure in record["tests"]]
    losses = [record["valid_bits"][-1] for record in found]
    return losses if in_bits(run) else [2**loss for loss in losses]


def in_bits(run: str) -> bool:
    """Whether the results of a part/run are bits, not perplexities."""
    return run.startswith("hierarchical/")


def verdict(one: Sequence[float], relation: str, other: Sequence[float]) -> str:
    """What the bits of two runs, a seed each, say about their claimed relation."""
    if not one or not other:
        return "not run"
    difference = sum(one) / len(one) - sum(other) / len(other)
    below = difference < -MARGIN and max(one) < min(other)
    above = difference > MARGIN and min(one) > max(other)
    observed = "<" if below else ">" if above else "="
    if observed in relation:
        return "confirmed"
    return "no difference" if observed == "=" else "not confirmed" if relation == "=" else "reversed"
