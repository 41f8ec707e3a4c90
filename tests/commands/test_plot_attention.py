"""`fairseq-ms plot attention`: what a multi-scale model looks at."""

from pathlib import Path

import pytest
import torch
from fairseq.models import FairseqLanguageModel

from fairseq_ms.commands.plot import attention
from fairseq_ms.tools import untrained
from tests.helpers.asked import answer

SIZES = "--decoder-embed-dim 12 --decoder-ffn-embed-dim 12 --decoder-attention-heads 3 --tokens-per-sample 32"
LENGTH = 23
# One layer everywhere, so that what is seen is what can have an influence.
MODELS = {
    "vanilla_lm": "--decoder-layers 1",
    "local vanilla_lm": "--decoder-layers 1 --scale-windows 1x=0:5",
    "retina_lm": "--decoder-layers 1 --scale-windows 1x=0:4,2x=4:8,4x=8:16",
    "coarse_lm": "--scale-layers 4x=1",
    "multiscale_topdown": "--scale-layers 4x=1,2x=1,1x=1",
    "multiscale_bottomup": "--scale-layers 4x=1,2x=1,1x=1 --scale-heads 2x=2,4x=1",
}


def influence(model: FairseqLanguageModel) -> torch.Tensor:
    """(T, T): whether the embedding of token p (column) has a gradient from the features of position t (row)."""
    decoder = model.decoder.core
    embedded = torch.randn(1, LENGTH, 12, requires_grad=True)
    decoder.embed.forward = lambda tokens, start=0: embedded
    features = decoder.features(torch.zeros(1, LENGTH, dtype=torch.long))
    found = [torch.autograd.grad(features[0, t].pow(3).sum(), embedded, retain_graph=True)[0] for t in range(LENGTH)]
    return torch.stack([grad[0].abs().sum(-1) > 0 for grad in found])


@pytest.mark.parametrize("name", MODELS)
def test_what_is_drawn_as_seen_is_what_has_a_gradient(name: str) -> None:
    torch.manual_seed(1)
    flags = ["--arch", name.split()[-1], *SIZES.split(), *MODELS[name].split()]
    model = untrained.build(flags, vocabulary=20)[0].eval()
    drawn = attention.patterns(model, LENGTH)
    seen = torch.stack([pattern.block >= 0 for pattern in drawn]).any(0)
    # A residual connection shows every position itself, whatever the windows.
    assert torch.equal(seen | torch.eye(LENGTH, dtype=torch.bool), influence(model) | torch.eye(LENGTH).bool())


def test_a_block_is_seen_whole_or_not_at_all() -> None:
    model = untrained.build(["--arch", "retina_lm", *SIZES.split(), *MODELS["retina_lm"].split()], 20)[0]
    for pattern in attention.patterns(model, LENGTH):
        for row in pattern.block:
            blocks, tokens = row[row >= 0].unique(return_counts=True)
            assert (tokens == pattern.factor).all(), (pattern.title, blocks, tokens)


def test_the_command_writes_panels_and_a_figure(tmp_path: Path, capsys) -> None:
    panels = answer(tmp_path, "plot", "attention", "--arch", "retina_lm_books_12_8_256_512", "--length", "64")["panels"]
    assert [panel["factor"] for panel in panels] == [1, 4, 16]
    assert len(panels[0]["block"]) == 64
    assert "4 heads, 4x=8:256" in capsys.readouterr().out
