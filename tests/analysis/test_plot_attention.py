"""What `fairseq-ms plot attention` draws, against what changes when a token does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_ms import cli
from fairseq_ms.analysis.plot.attention import tokens_seen
from tests.registry import build, dictionary

LENGTH = 27  # which no scale divides
SIZES = {
    "decoder_embed_dim": 12,
    "decoder_ffn_embed_dim": 8,
    "decoder_attention_heads": 6,
    "init_std": 0.5,
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("vanilla_lm", {"decoder_layers": 1}),
    ("vanilla_lm", {"decoder_layers": 1, "scale_windows": "1x=0:5"}),
    ("retina_lm", {"decoder_layers": 1, "scale_windows": "1x=0:4,2x=4:10,4x=10:20"}),
    ("retina_lm", {"decoder_layers": 1, "scale_windows": "1x=0:8,2x=4:12", "window_overlap": "allow"}),
    ("multiscale_topdown", {"scale_layers": "6x=1,2x=1,1x=1"}),
    ("multiscale_bottomup", {"scale_layers": "6x=1,2x=1,1x=1"}),
    ("coarse_lm", {"scale_layers": "4x=1"}),
]


def place(arch: str, scale: int, output: int) -> int | None:
    """The position among a scale's representations from which this output gets what that scale has read."""
    if arch == "multiscale_bottomup":
        finished = (output + 1) // scale
        return finished - 1 if finished else None
    return output // scale


@pytest.mark.parametrize(("arch", "flags"), MODELS, ids=lambda value: value if isinstance(value, str) else None)
def test_a_token_is_drawn_where_changing_it_changes_what_the_scale_gives(arch: str, flags: dict[str, Any]) -> None:
    torch.manual_seed(2)
    model = build(arch, {**SIZES, **flags}, dictionary(9), positions=LENGTH).double().eval()
    drawn = tokens_seen(model, LENGTH)
    tokens = torch.randint(4, 13, (1, LENGTH))

    def given(row: torch.Tensor) -> dict[int, torch.Tensor]:
        if "scale_windows" in flags:  # its scales are kinds of heads in one layer, which gives one output
            return {0: model.decoder.features(row)}
        return model.decoder.representations(row)

    before = given(tokens)
    for token in range(LENGTH):
        changed = tokens.clone()
        changed[0, token] = 4 + (int(tokens[0, token]) - 3) % 9
        after = given(changed)
        for scale in before:
            differs = (before[scale] != after[scale]).any(-1)[0]
            for output in range(LENGTH):
                if scale == 0:
                    found = bool(differs[output])
                    expected = output == token or any(bool(mask[output, token]) for mask in drawn.values())
                else:
                    where = place(arch, scale, output)
                    found = where is not None and bool(differs[where])
                    expected = bool(drawn[scale][output, token])
                assert found == expected, (scale, output, token)


def test_the_command_draws_the_papers_retina(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "masks.json"), "--png", str(tmp_path / "masks.png")]
    assert cli.main(["plot", "attention", "--arch", "retina_lm_books_12_8_256_512", "--tokens", "300", *files]) == 0
    printed = capsys.readouterr().out
    assert "16x" in printed
    scales = json.loads((tmp_path / "masks.json").read_text())["scales"]
    assert {name: sum(mask[-1]) for name, mask in scales.items()} == {"1x": 8, "4x": 248, "16x": 48}
    assert (tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["attention", "--arch", "transformer_xl", "--tokens-per-sample", "8"],
            "--arch must be a model of the multi-scale paper",
        ),
        (["attention"], "--arch must name an architecture: got none"),
        (["context", "--arch", "vanilla_lm"], "plot context has sizes of its own and takes no flags of fairseq's"),
    ],
)
def test_what_has_no_such_figure_is_one_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plot", *flags]) == 2
    assert sentence in capsys.readouterr().err
