"""The rule that gives the verdicts of docs/papers/claims.md; sentences.json has the claims and what tests them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf, log2, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

Record = dict[str, Any]

CLAIMS: list[Record] = json.loads(Path(__file__).with_name("sentences.json").read_text(encoding="utf-8"))
PAPERS = {"multiscale": "Multi-scale Transformer LMs", "transformer_ql": "Transformer-QL", "haed": "HAED"}

# Student's t at 97.5 %, of 1 to 10 degrees of freedom; the last serves for more, too.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Effect:
    """One model's result less another's: bits (log2 of the ratio of perplexities), or per cent of time or memory.

    Attributes:
        mean: over the pairs
        low: end of its 95 % interval; of one pair, of the interval that the seeds of comparable models would give
        high: the other end
        pairs: runs of both models with one seed, so with the same batches; None for time and memory
    """

    mean: float
    low: float
    high: float
    pairs: int | None

    @property
    def resolution(self) -> float:
        """The smallest effect that an interval as wide as this tells from none."""
        return (self.high - self.low) / 2


def student(freedom: int) -> float:
    """Half the width of a 95 % interval in standard errors."""
    return STUDENT[min(freedom, len(STUDENT)) - 1]


def of_run(records: Sequence[Record], run: str) -> dict[str, Record]:
    """The records of a part/run by seed."""
    return {record["job"].rpartition("/")[2]: record for record in records if record["job"].rpartition("/")[0] == run}


def in_characters(run: str) -> bool:
    """Whether results of a part/run are bits a character, not perplexities."""
    return run.startswith("hierarchical")


def bits(records: Sequence[Record], run: str, measure: str) -> dict[str, float]:
    """A run's bits by seed: of a column of its tests, or of its last validation."""
    found = of_run(records, run)
    if measure == "last valid":
        return {seed: record["valid_bits"][-1] for seed, record in found.items()}
    tests = {seed: record["tests"][measure] for seed, record in found.items() if measure in record["tests"]}
    return tests if in_characters(run) else {seed: log2(value) for seed, value in tests.items()}


def of_one_pair(records: Sequence[Record], run: str, measure: str) -> float:
    """How far two runs of one model with different seeds lie apart, in bits, 19 times of 20.

    From all models of the same part with the same measure that have several seeds; infinite where none has.
    """
    part = run.partition("/")[0]
    names = {record["job"].rpartition("/")[0] for record in records if record["job"].partition("/")[0] == part}
    seeds = [list(bits(records, name, measure).values()) for name in names]
    several = [values for values in seeds if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    if not freedom:
        return inf
    variance = sum((len(values) - 1) * stdev(values) ** 2 for values in several) / freedom
    return student(freedom) * sqrt(2 * variance)


def effect(records: Sequence[Record], test: Mapping[str, Any]) -> Effect | None:
    """What a test of sentences.json found; None where its runs are not done."""
    if "page" in test:
        one, other = sorted(test["one"]), sorted(test["other"])
        ratios = (median(one) / median(other), one[0] / other[-1], one[-1] / other[0])
        return Effect(*(100 * (ratio - 1) for ratio in ratios), pairs=None)
    if "one" not in test:
        return None
    measure = test.get("measure", "test")
    first = bits(records, test["one"], measure)
    second = bits(records, test["other"], test.get("other_measure", measure))
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    if not differences:
        return None
    mean, pairs = fmean(differences), len(differences)
    if pairs == 1:
        half = of_one_pair(records, test["one"], measure)
    else:
        half = student(pairs - 1) * stdev(differences) / sqrt(pairs)
    return Effect(mean, mean - half, mean + half, pairs)


def verdict(found: Effect | None, claimed: str, paper: float | None, void: str | None = None) -> str:
    """What an effect says about a claim.

    Args:
        found: ours; None where it was not measured
        claimed: "less", "more", "level", or "at most" (less than twice the paper's effect, or than 0 where it has none)
        paper: the paper's effect, where it has a number
        void: why the test is no test of this claim
    """
    if void or found is None:
        return f"not tested: {void or 'not run'}"
    none = 2 * paper if claimed == "at most" and paper is not None else 0.0
    below, above = found.high < none, found.low > none
    agrees = {"less": below, "at most": below, "more": above, "level": False}[claimed]
    if found.pairs == 1:
        if isinf(found.resolution):
            return "inconclusive: one pair, spread of seeds unknown"
        if not (below or above):
            return "inconclusive: one pair, within the spread of seeds"
        return f"inconclusive: one pair, points {'the same' if agrees else 'the other'} way"
    if below or above:
        if agrees and none and found.high < 0:
            return "no loss, where the paper has one"
        smaller = agrees and none == 0 and paper is not None and max(map(abs, (found.low, found.high))) < abs(paper)
        return ("confirmed, but smaller" if smaller else "confirmed") if agrees else "reversed"
    if none:
        return "inconclusive: the interval holds twice the paper's effect"
    if paper is not None and found.low <= paper <= found.high:
        return "inconclusive: the interval holds 0 and the paper's effect"
    unit = "%" if found.pairs is None else " bits"
    return f"no difference larger than {max(-found.low, found.high):.{1 if found.pairs is None else 3}f}{unit}"
