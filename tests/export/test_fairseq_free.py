"""The classes of fairseq's that are defined anew give what fairseq's give, by the same names."""

import pytest
import torch
from fairseq import modules

from fairseq_ms.export.hf import fairseq_free


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal but for the order in which a few products are summed."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("cutoff", [[5, 9], [5, 20]])
def test_adaptive_input_gives_what_fairseqs_gives(cutoff: list[int], factor: int) -> None:
    theirs = modules.AdaptiveInput(20, 1, 8, factor, 8, list(cutoff))
    ours = fairseq_free.AdaptiveInput(20, 1, 8, factor, 8, list(cutoff))
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.arange(20).view(4, 5)
    assert_close(ours(tokens), theirs(tokens))


@pytest.mark.parametrize(("tied", "tie_proj"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("cutoff", [[5, 9], [5, 20]])
def test_adaptive_softmax_gives_what_fairseqs_gives(cutoff: list[int], tied: bool, tie_proj: bool) -> None:
    outputs = []
    state = None
    for room in (modules, fairseq_free):
        words = room.AdaptiveInput(20, 1, 8, 2, 8, list(cutoff))
        softmax = room.AdaptiveSoftmax(20, 8, list(cutoff), 0.0, 2, words if tied else None, tie_proj)
        state = state or softmax.state_dict()
        softmax.load_state_dict(state)
        features = torch.linspace(-3, 3, 48).view(2, 3, 8)
        outputs.append(softmax.eval().get_log_prob(features, None))
    assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[1].exp().sum(-1), torch.ones(2, 3))


def test_a_position_embedding_gives_what_fairseqs_gives() -> None:
    theirs = modules.LearnedPositionalEmbedding(6, 4, None)
    ours = fairseq_free.LearnedPositionalEmbedding(6, 4)
    ours.load_state_dict(theirs.state_dict())
    tokens, positions = torch.zeros(2, 3, dtype=torch.long), torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(ours(tokens, positions=positions), theirs(tokens, positions=positions))
