"""Letters of shapes have one meaning."""

import re
from pathlib import Path

from fairseq_ms import core

# The letters after the last underscore of a variable: x_BTD, own_N1.
SHAPED = re.compile(r"\b[a-z][a-z0-9_]*_([A-Z0-9]*[A-Z][A-Z0-9]*)\b")


def test_the_legend_has_every_letter_of_a_shape_once() -> None:
    folder = Path(core.__file__).parent
    names = [name for path in folder.rglob("*.py") for name in SHAPED.findall(path.read_text(encoding="utf-8"))]
    table = (core.__doc__ or "").partition("``core``,")[2].partition("In attention")[0]
    legend = re.findall(r"(?:^ {4}|  |, )([A-Z])(?= |,)", table, re.MULTILINE)
    assert len(legend) == len(set(legend)), legend
    assert {*"".join(names)} - {*"12"} <= {*legend, "X"}
