"""Every subcommand that takes ``--arch``, over every model and every adaptive preset: an answer or one sentence."""

from __future__ import annotations

import pytest

from fairseq_ms.analysis import untrained
from fairseq_ms.cli import COMMANDS, main, parser_of
from fairseq_ms.lm.registry import PRESETS
from tests.registry import ARCHITECTURES, setting

ADAPTIVE = [name for name, preset in PRESETS.items() if preset.values.get("adaptive_softmax_cutoff")]
NAMES = sorted([*ADAPTIVE, *ARCHITECTURES])
# Few dimensions and layers do not change what the vocabulary has to be.
SMALL = ["--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2"]


def streams(name: str) -> bool:
    return setting(PRESETS[name].model if name in PRESETS else name, "TASK", "") == "streaming_language_modeling"


def test_three_commands_take_an_architecture() -> None:
    taking = {name for name in COMMANDS if parser_of(name)[0].get_default("fairseq_flags") is not None}
    assert taking == {"context-length", "memory", "plot"}


@pytest.mark.parametrize("name", NAMES)
def test_the_context_length_of_every_architecture_or_one_sentence(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [] if name in PRESETS else ["--tokens-per-sample", "8"]
    code = main(["context-length", "--arch", name, *lengths])
    printed = capsys.readouterr()
    if streams(name):
        assert code == 0
        assert "formula" in printed.out
    else:
        assert code == 2
        assert printed.err.startswith("fairseq-ms: --arch must be a model with a memory")


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_of_every_architecture(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [] if streams(name) and name in PRESETS else ["--tokens-per-sample", "8"]
    assert main(["memory", "--arch", name, *lengths, "--no-measurement", "--cpu"]) == 0
    printed = capsys.readouterr().out
    assert ("200002 symbols" if "wt103" in name and name in ADAPTIVE else "symbols") in printed


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_vocabulary_that_the_cutoffs_exceed_gets_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--arch", name, "--vocabulary", "1000", "--cpu"]) == 2
    assert "bands of at least 2 symbols up to the dictionary's 1000: got '20000,40000" in capsys.readouterr().err


def test_the_context_of_an_adaptive_preset_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = [*SMALL, "--decoder-layers", "2"]
    assert main(["context-length", "--arch", "transformer_xl_simplebooks92", *small, "--measure"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] != []]
    formula, measured = (next(row for row in rows if row[0] == kind) for kind in ("formula", "measured"))
    assert formula[1:] == measured[1:]


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("softmax", "20,10"),
        ("softmax", "0,10"),
        ("softmax", "10,10"),
        ("softmax", "ten"),
        ("input", "10,41"),
        ("input", "10,39"),
        ("input", "1,20"),
        ("softmax", "10,41"),
        ("input", "__import__('os')"),
    ],
)
def test_cutoffs_that_are_no_ascending_numbers_are_refused(
    flag: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cutoff = [f"--adaptive-{flag}-cutoff", text, *(["--adaptive-input"] if flag == "input" else [])]
    command = ["memory", "--arch", "vanilla_lm", *SMALL, "--tokens-per-sample", "8", "--vocabulary", "40", *cutoff]
    assert main(command) == 2
    assert f"--adaptive-{flag}-cutoff must be ascending" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["transformer_ql_wt103", "compressive_transformer_simplebooks92"])
def test_an_adaptive_preset_is_built_over_as_many_symbols_as_its_last_cutoff(name: str) -> None:
    cfg = untrained.parse(["--arch", name])
    symbols = max(int(cutoff) for cutoff in cfg.model.adaptive_softmax_cutoff.split(","))
    untrained.build_model(cfg, symbols, on_meta=True)
