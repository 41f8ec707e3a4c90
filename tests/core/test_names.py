"""Names of before are still names of the same things, and letters of shapes have one meaning."""

import importlib
import re
from pathlib import Path

import pytest

from fairseq_ms import core

# The letters behind the last underscore of a variable: x_BTD, own_N1.
SHAPED = re.compile(r"\b[a-z][a-z0-9_]*_([A-Z0-9]*[A-Z][A-Z0-9]*)\b")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("modules.transformer", "core.layers"),
        ("modules.pooling", "core.pooling"),
        *((f"ops.{name}", f"core.ops.{name}") for name in ("attention", "linear", "recompute", "window_attention")),
        ("ops.relative_attention", "core.ops.relative_attention"),
    ],
)
def test_the_older_name_of_a_module_is_the_module(old: str, new: str) -> None:
    assert importlib.import_module(f"fairseq_ms.{old}") is importlib.import_module(f"fairseq_ms.{new}")


def test_the_legend_has_every_letter_of_a_shape_once() -> None:
    folder = Path(core.__file__).parent
    names = [name for path in folder.rglob("*.py") for name in SHAPED.findall(path.read_text(encoding="utf-8"))]
    table = (core.__doc__ or "").partition("``core``,")[2].partition("and X")[0]
    legend = re.findall(r"(?:^ {4}|  |, )([A-Z])(?= |,)", table, re.MULTILINE)
    assert len(legend) == len(set(legend)), legend
    assert {*"".join(names)} - {*"12"} <= {*legend, "X"}
