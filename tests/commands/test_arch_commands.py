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
    # WikiText-103's words.
    assert ("267735 symbols" if "wt103" in name and preset else "symbols") in capsys.readouterr().out
