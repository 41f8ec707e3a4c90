"""A training forward that ``torch.compile`` traces."""

import pytest
import torch
from torch import Tensor, nn

from tests.core.test_model import build as small
from tests.registry import trained_case


def gradients(model: nn.Module, logits: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1.0, 1.0, logits.numel()).view_as(logits)
    parameters = list(model.parameters())
    grads = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    # What the logits do not depend on has no gradient, or zeros when it is compiled.
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)]


# A stack of layers, one for every scale, and layers with a memory: what others add is traced for up to ten minutes.
@pytest.mark.parametrize(("arch", "seed"), [("vanilla_lm", 1), ("multiscale_topdown", 3), ("transformer_xl", 3)])
def test_a_compiled_training_step_gives_what_the_model_gives(arch: str, seed: int) -> None:
    case = trained_case(arch, seed)
    tokens = case.tokens(2, 7)
    for module in case.model.modules():
        if hasattr(module, "recompute"):
            # What is compiled draws torch's own masks.
            module.recompute = False
    torch._dynamo.reset()
    compiled = torch.compile(case.model, backend="eager")
    results = []
    for model in (case.model, compiled):
        torch.manual_seed(5)
        logits = model(tokens)[0]
        results.append([logits, *gradients(case.model, logits)])
        # Another step has other masks of dropout.
        assert (model(tokens)[0] != logits).any()
    for one, other in zip(*results, strict=True):
        # float32, the same operations.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_retina_without_dropout_compiles() -> None:
    model, tokens = small("Retina"), torch.randint(11, (2, 41), generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    results = []
    for loss_of in (model.loss, torch.compile(model.loss, backend="eager")):
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)])
    for one, other in zip(*results, strict=True):
        # float32, the same operations; positions that no token has are without a gradient.
        torch.testing.assert_close(torch.zeros(1) if one is None else one, torch.zeros(1) if other is None else other)
