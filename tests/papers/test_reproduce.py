"""docs/papers/reproduce.md's tables of hyper-parameters against presets, configurations and scripts."""

import math
import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from fairseq.models import MODEL_DATACLASS_REGISTRY
from omegaconf import OmegaConf

from fairseq_ms.commands.config import settings
from fairseq_ms.presets.registry import CONFIGS
from tests.helpers.cli import ROOT
from tests.helpers.hydra import OF_PAPERS, by_hydra

PAPERS = {
    "Multi-scale Transformer Language Models": "vanilla_lm retina_lm multiscale_topdown multiscale_bottomup coarse_lm",
    "Transformer-QL": "transformer_xl compressive_transformer transformer_ql",
    "Hierarchical Attention Encoder Decoder": "haed hred",
}


class Row(NamedTuple):
    title: str
    what: str
    paper: str
    presets: str
    setting: str
    value: str
    here: str


def rows() -> list[Row]:
    text = (ROOT / "docs" / "papers" / "reproduce.md").read_text(encoding="utf-8").split("## Every hyper-parameter")[1]
    found = []
    for title, table in re.findall(r"^### (.+)\n\n((?:\|.*\n)+)", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            found.append(Row(title, *(cell.strip() for cell in line.strip("|").split("|"))))
    return found


ROWS = rows()


def names(row: Row) -> list[str]:
    """The presets and runs of the row's paper that it is about."""
    models = PAPERS[row.title].split()
    own = [name for name, preset in OF_PAPERS.items() if preset.model in models]
    if row.presets == "all":
        return own
    patterns = re.findall(r"`([^`]+)`", row.presets)
    assert all(any(fnmatchcase(name, pattern) for name in own) for pattern in patterns), row
    return [name for name in own if any(fnmatchcase(name, pattern) for pattern in patterns)]


@cache
def composed(name: str) -> Any:
    return by_hydra(name)


def setting(name: str, path: str) -> Any:
    """What the configuration says, or else fairseq's or the model's default."""
    value: Any = settings(CONFIGS[name])
    section, *rest = path.split(".")
    for key in (section, *rest):
        value = value.get(key, None) if isinstance(value, dict) else None
    if value is None and section == "model":
        return MODEL_DATACLASS_REGISTRY[CONFIGS[name].model].__dataclass_fields__[rest[0]].default
    if value is None:
        value = OmegaConf.select(composed(name), path)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def number(text: str) -> float | None:
    """The number that a cell such as 40000 + 1000000, 0.004 x 0.0001 or 256 is, None if it is none."""
    for sign, combine in ((" + ", sum), (" x ", math.prod)):
        if sign in text:
            parts = [number(part) for part in text.split(sign)]
            known = [part for part in parts if part is not None]
            return combine(known) if len(known) == len(parts) else None
    try:
        return float(text)
    except ValueError:
        return None


def same(left: str, right: str) -> bool:
    first, second = number(left), number(right)
    if first is None or second is None:
        return left == right
    return math.isclose(first, second, rel_tol=1e-9)


def test_all_three_papers_have_a_table() -> None:
    assert {row.title for row in ROWS} == set(PAPERS)
    assert len(ROWS) > 120


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.title[:5]}-{row.what}")
def test_a_row_says_what_the_presets_say_and_equal_only_of_what_is(row: Row) -> None:
    covered = names(row)
    assert covered, "the row must be about some preset"
    parts = re.findall(r"`([^`]+)`", row.setting)
    if not parts:
        assert row.setting == row.value == "-"
        assert not row.here.startswith("equal")
    elif "/" in parts[0]:
        file = ROOT / parts[0]
        assert row.value.replace("000", "_000") in (text := file.read_text(encoding="utf-8")) or row.value in text
        assert re.findall(r"\d+", row.value) == [row.paper]
    else:
        for name in covered:
            values = [setting(name, part) for part in parts]
            if len(values) == 1:
                (actual,) = values
                if isinstance(actual, bool):
                    assert actual is yaml.safe_load(row.value), name
                else:
                    assert same(str(actual), row.value), f"{name}: {actual}"
            else:
                first, second = map(float, values)
                combined = first / second if " / " in row.setting else first * second
                assert same(str(combined), row.value), name
    status, _, reason = row.here.partition(" ")
    if row.here == "equal":
        assert same(row.paper, row.value) or "/" in parts[0], "said to be equal"
    elif status == "by":
        (test,) = re.findall(r"`(test_\w+)`", reason)
        assert any(
            f"def {test}(" in file.read_text(encoding="utf-8") for file in Path(ROOT, "tests").rglob("test_*.py")
        )
    else:
        assert status in ("not:", "open:")
        assert len(reason) > 5
        assert not same(row.paper, row.value)
