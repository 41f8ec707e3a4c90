"""A training forward that ``torch.compile`` traces."""

import dataclasses

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY
from torch import Tensor, nn

from tests.registry import Case, build, random_case

DROPPED = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}


def trained_case(arch: str, seed: int) -> Case:
    """A small random model in training mode, with dropout wherever it has a flag."""
    case = random_case(arch, seed)
    known = {flag: p for flag, p in DROPPED.items() if hasattr(MODEL_DATACLASS_REGISTRY[arch], flag)}
    torch.manual_seed(seed)
    model = build(arch, {"init_std": 0.4, **case.flags, **known}, case.dictionary).train()
    return dataclasses.replace(case, model=model)


def gradients(model: nn.Module, logits: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1.0, 1.0, logits.numel()).view_as(logits)
    parameters = list(model.parameters())
    grads = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    # What the logits do not depend on has no gradient, or zeros when it is compiled.
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)]


# A stack of layers, one for every scale, and layers with a memory: what others add is traced for up to ten minutes.
@pytest.mark.parametrize("arch", ["vanilla_lm", "multiscale_topdown", "transformer_xl"])
def test_a_compiled_training_step_gives_what_the_model_gives(arch: str) -> None:
    case = trained_case(arch, 3)
    tokens = case.tokens(2, 7)
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
