"""Adaptive embeddings and softmax against fairseq's, by the same names of parameters."""

import pytest
import torch
from fairseq import modules

from fairseq_ms.core import adaptive


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal but for the order in which a few products are summed."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("cutoff", [[5, 9], [5, 20]])
def test_adaptive_input_gives_what_fairseqs_gives(cutoff: list[int], factor: int) -> None:
    theirs = modules.AdaptiveInput(20, 1, 8, factor, 8, list(cutoff))
    ours = adaptive.AdaptiveInput(20, 1, 8, adaptive.Bands(tuple(cutoff), factor))
    ours.load_state_dict(dict(theirs.named_parameters(remove_duplicate=False)))
    tokens = torch.arange(20).view(4, 5)
    assert_close(ours(tokens), theirs(tokens))


@pytest.mark.parametrize(("tied", "tie_proj"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("cutoff", [[5, 9], [5, 20]])
def test_adaptive_softmax_gives_what_fairseqs_gives(cutoff: list[int], tied: bool, tie_proj: bool) -> None:
    words = modules.AdaptiveInput(20, 1, 8, 2, 8, list(cutoff))
    theirs = modules.AdaptiveSoftmax(20, 8, list(cutoff), 0.0, 2, words if tied else None, tie_proj)
    own_words = adaptive.AdaptiveInput(20, 1, 8, bands := adaptive.Bands(tuple(cutoff), 2.0))
    ours = adaptive.AdaptiveSoftmax(20, 8, bands, own_words if tied else None, tie_proj)
    ours.load_state_dict(dict(theirs.named_parameters(remove_duplicate=False)))
    features = torch.linspace(-3, 3, 48).view(2, 3, 8)
    log_probs = ours.log_probs(features)
    assert_close(log_probs, theirs.get_log_prob(features, None))
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 3))
    for target in (torch.tensor([[1, 6, 11], [19, 4, 5]]), torch.tensor([[1, 2, 3], [0, 4, 1]])):
        for one, other in zip((*ours(features, target),), (*theirs(features, target),)):
            for mine, fairseqs in zip(one, other, strict=True):
                assert (mine is None) == (fairseqs is None)
                if mine is not None:
                    assert_close(mine, fairseqs)
