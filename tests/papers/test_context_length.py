"""How far streaming models look back: the paper's numbers, its Figure 5, and the networks themselves."""

import json
from pathlib import Path

import pytest

from fairseq_ms.cli import main
from fairseq_ms.papers.context_length import NARROW, by_formula, measured, transformer_ql
from tests.commands import test_arch_commands as presets
from tests.registry import build, dictionary

SMALL = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 16, "decoder_attention_heads": 2}


@pytest.mark.parametrize("compression", ["max", "avg"])
def test_the_network_of_figure_5_sees_44_tokens_before_the_first_of_a_segment(compression: str) -> None:
    flags = {"tokens_per_sample": 4, "mem_len": 4, "scale_layers": "1x=1,2x=1,4x=1", "output_layers": 1}
    model = build("transformer_ql", {**SMALL, **flags, "compression": compression}, dictionary(9))
    assert measured(model.decoder.core).minimum == 44
    assert by_formula(model.decoder.core).minimum == 44


@pytest.mark.parametrize(
    ("arch", "segment", "memory"),
    [
        ("transformer_xl", 4, 12),
        ("transformer_xl", 8, 24),
        ("transformer_ql", 4, 12),
        ("transformer_ql", 8, 24),
        ("transformer_ql", 8, 8),
        ("transformer_ql", 16, 16),
        ("transformer_ql", 2, 14),
        ("transformer_ql", 16, 0),
    ],
)
def test_the_network_sees_as_far_as_the_formula_says(arch: str, segment: int, memory: int) -> None:
    model = build(arch, {**SMALL, "tokens_per_sample": segment, "mem_len": memory}, dictionary(9))
    assert measured(model.decoder.core) == by_formula(model.decoder.core)


@pytest.mark.parametrize(
    ("arch", "memory", "said"),
    [
        ("transformer_xl", 4, True),
        ("transformer_ql", 4, True),
        ("transformer_xl", 8, False),
        ("transformer_ql", 8, False),
    ],
)
def test_where_the_formula_does_not_hold_the_command_says_so(
    arch: str, memory: int, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--decoder-layers", "2"] if arch == "transformer_xl" else []
    flags += ["--arch", arch, "--tokens-per-sample", "8", "--mem-len", str(memory), *NARROW]
    for more in ([], ["--measure", "--json", str(tmp_path / "found.json")]):
        assert main(["context-length", *flags, *more]) == 0
        assert ("this model sees farther" in capsys.readouterr().out) == said
    found = json.loads((tmp_path / "found.json").read_text())
    formula, network = (found["results"][kind]["minimum"] for kind in ("formula", "measured"))
    assert (formula < network) == said == (not found["formula_holds"])


def test_a_compressive_network_sees_farther_than_the_paper_counts() -> None:
    # Its 18 states of memory begin inside a segment of 4, whose first states saw as far back as its beginning did.
    flags = {"tokens_per_sample": 4, "mem_len": 6, "compressed_mem_len": 6, "decoder_layers": 8}
    model = build("compressive_transformer", {**SMALL, **flags}, dictionary(9))
    assert by_formula(model.decoder.core).minimum == 8 * 18
    assert measured(model.decoder.core).minimum == 7 * 20 + 18


def test_the_command_prints_the_paper_s_tables_and_a_model_s_context(tmp_path: Path) -> None:
    assert main(["context-length", "--paper", "--json", str(tmp_path / "paper.json")]) == 0
    rows = json.loads((tmp_path / "paper.json").read_text())["paper"]
    # At 02/30 the paper prints the minimum, 332, for the average.
    assert [row["average"] for row in rows] == [98, 146, 138, 196, 292, 276, 68, 100, 136, 200, 241, 333, 8, 16, 32, 64]
    assert [row["average"] - row["printed"] for row in rows if row["average"] != row["printed"]] == [1.0]
    assert transformer_ql(2, 30, {1: 3, 2: 3}, 2).minimum == 332
    flags = ["--arch", "transformer_ql", "--tokens-per-sample", "4", "--mem-len", "4", "--decoder-embed-dim", "16"]
    flags += ["--scale-layers", "1x=1,2x=1,4x=1", "--output-layers", "1", "--decoder-attention-heads", "2"]
    assert main(["context-length", *flags, "--measure", "--json", str(tmp_path / "one.json")]) == 0
    results = json.loads((tmp_path / "one.json").read_text())["results"]
    assert results["formula"] == results["measured"] == {"minimum": 44, "maximum": 48, "average": 46.0}


def test_the_context_of_an_adaptive_preset_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = [*presets.SMALL, "--decoder-layers", "2"]
    assert main(["context-length", "--arch", "transformer_xl_simplebooks92", *small, "--measure"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    formula, measured = (next(row for row in rows if row[0] == kind) for kind in ("formula", "measured"))
    assert formula[1:] == measured[1:]
