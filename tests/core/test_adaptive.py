"""The adaptive softmax against sums over its bands, word by word."""

import pytest
import torch

from fairseq_ms.core.adaptive import AdaptiveInput, AdaptiveSoftmax, Bands

ENDS = (0, 4, 9, 20)


def test_every_weight_has_a_gradient_whatever_words_there_are() -> None:
    """As processes that average gradients need it."""
    softmax, x = AdaptiveSoftmax(20, 8, Bands((4, 9), 2.0)), torch.randn(5, 8)
    for targets in (torch.zeros(5, dtype=torch.long), torch.tensor([0, 5, 5, 1, 8])):
        softmax.zero_grad()
        logits, _ = softmax(x, targets)
        torch.stack([found.sum() for found in logits if found is not None]).sum().backward()
        idle = {name: weight.grad for name, weight in softmax.named_parameters() if name.startswith("tail.1.")}
        assert all(grad is not None and not grad.any() for grad in idle.values())
        assert all(weight.grad is not None for weight in softmax.parameters())


@pytest.mark.parametrize("project_head", [False, True])
@pytest.mark.parametrize(("tied", "tie_projections"), [(False, False), (True, False), (True, True)])
def test_a_word_has_the_probability_of_its_band_times_its_own_within_it(
    tied: bool, tie_projections: bool, project_head: bool
) -> None:
    """Tied projections are those of the input, of its first band with ``project_head`` (Transformer-XL)."""
    bands = Bands((4, 9), 2.0)
    words = AdaptiveInput(20, 1, 8, bands).double()
    softmax = AdaptiveSoftmax(20, 8, bands, words if tied else None, tie_projections, project_head).double()
    weights = softmax.state_dict()
    inputs = {name: weight for name, weight in words.state_dict().items() if tie_projections}
    head = [value for name, value in weights.items() if name.startswith("head.")]
    projections = [inputs.get("embeddings.0.1.weight", weights.get("project_head.weight", torch.zeros(8, 8)).t())]
    projections += [inputs.get(f"embeddings.{n}.1.weight", weights[f"tail.{n - 1}.0.weight"].t()) for n in (1, 2)]
    x_D, found = torch.linspace(-3.0, 3.0, 8, dtype=torch.float64), []
    first_D = x_D @ projections[0] if project_head else x_D
    first = (torch.cat(head) @ first_D).softmax(0)
    for word in range(20):
        band = sum(word >= end for end in ENDS[1:])
        if not band:
            found.append(first[word])
            continue
        within = (weights[f"tail.{band - 1}.2.weight"] @ (x_D @ projections[band])).softmax(0)
        found.append(first[ENDS[1] + band - 1] * within[word - ENDS[band]])
    log_probs = softmax.log_probs(x_D[None, None])
    torch.testing.assert_close(log_probs[0, 0].exp(), torch.stack(found), rtol=1e-12, atol=1e-15)
    assert project_head == any(name.startswith("project_head") for name in weights)
    logits, _ = softmax(x_D[None, None], torch.tensor([[1]]))
    torch.testing.assert_close(logits[0].softmax(1)[0], first)
