"""`memory --arch` over every model and every adaptive preset."""

from __future__ import annotations

import pytest

from fairseq_ms.cli import main
from fairseq_ms.presets.registry import PRESETS
from tests.registry import ARCHITECTURES, setting

ADAPTIVE = [name for name, preset in PRESETS.items() if preset.values.get("adaptive_softmax_cutoff")]
NAMES = sorted([*ADAPTIVE, *ARCHITECTURES])
# Few dimensions and layers do not change what the vocabulary has to be.
SMALL = ["--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2"]


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_of_every_architecture_or_preset(name: str, capsys) -> None:
    preset = PRESETS.get(name)
    streams = setting(preset.model if preset else name, "TASK", "") == "streaming_language_modeling"
    lengths = [] if streams and preset else ["--tokens-per-sample", "8"]
    assert main(["memory", "--arch", name, *lengths, "--no-measurement", "--cpu"]) == 0
    assert ("200002 symbols" if "wt103" in name and preset else "symbols") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("softmax", "20,10"),
        ("softmax", "0,10"),
        ("softmax", "10,10"),
        ("input", "1,20"),
        ("input", "__import__('os')"),
    ],
)
def test_cutoffs_that_are_no_ascending_numbers_are_refused(flag: str, text: str, capsys) -> None:
    cutoff = [f"--adaptive-{flag}-cutoff", text, *(["--adaptive-input"] if flag == "input" else [])]
    command = ["memory", "--arch", "vanilla_lm", *SMALL, "--tokens-per-sample", "8", "--vocabulary", "40", *cutoff]
    assert main(command) == 2
    assert f"--adaptive-{flag}-cutoff must" in capsys.readouterr().err
