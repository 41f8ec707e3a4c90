"""The invariants over all kernels of attention, and in the backward pass, whatever is recomputed."""

from contextlib import AbstractContextManager

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.helpers.operations import Operations
from tests.registry import GENERATORS, build, exact_case, random_case, seeds, setting

# What a kernel does not do (masks, a precision) torch's plain products do.
BACKENDS = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
SEEDS = seeds(2, 4)
# float64, as in test_invariants.
EXACT = 1e-9


def preferring(backend: SDPBackend) -> AbstractContextManager[None]:
    """A context in which attention takes this kernel wherever it can."""
    kernels: AbstractContextManager[None] = sdpa_kernel([backend, SDPBackend.MATH], set_priority=True)
    return kernels


@pytest.mark.cpu
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=lambda backend: backend.name)
def test_attention_takes_the_kernel_that_is_preferred(backend: SDPBackend) -> None:
    case = random_case("vanilla_lm", 1)
    with torch.no_grad(), preferring(backend), Operations() as ran:
        case.model(case.tokens(2, case.lengths()))
    wanted = {"aten::_scaled_dot_product_flash_attention_for_cpu"} if backend == SDPBackend.FLASH_ATTENTION else set()
    assert {name for name in ran.names if "flash" in name} == wanted


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("precision", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("arch", GENERATORS)
def test_future_tokens_do_not_change_past_logits(
    arch: str, backend: SDPBackend, precision: torch.dtype, seed: int
) -> None:
    case = random_case(arch, seed)
    case.model.to(precision)
    tokens, changed, changed_at = case.with_another_future(3)
    with torch.no_grad(), preferring(backend):
        before, after = case.model(tokens)[0], case.model(changed)[0]
    difference = (before - after).abs().amax((0, 2))
    # Chunks that a later token ends are computed beside others, so that rows are added up in another order.
    by_shape = 0.05 * before.abs().max().item() if precision == torch.bfloat16 else EXACT
    assert difference[:changed_at].max() <= (by_shape if setting(arch, "TOLERANCE", 0.0) else 0.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("arch", GENERATORS)
def test_caches_and_padding_change_nothing(arch: str, backend: SDPBackend, seed: int) -> None:
    case = exact_case(arch, seed)
    length = case.lengths()
    tokens = case.tokens(3, length)
    state: dict = {}
    with torch.no_grad(), preferring(backend):
        full = case.model(tokens)[0]
        padded = case.model(torch.nn.functional.pad(tokens, (0, 5), value=case.dictionary.pad()))[0]
        steps = [case.model.decoder(tokens[:, : end + 1], incremental_state=state)[0] for end in range(length)]
    torch.testing.assert_close(padded[:, :length], full, rtol=0.0, atol=EXACT)
    torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=0.0, atol=EXACT)


def past_gradients(model: torch.nn.Module, tokens: torch.Tensor, until: int) -> list[torch.Tensor]:
    """What the logits in front of a position say to the weights."""
    weights = torch.linspace(-1.0, 1.0, until, dtype=torch.float64)[None, :, None]
    loss = (model(tokens)[0][:, :until] * weights).square().sum()
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("arch", "recompute"),
    [
        (arch, recompute)
        for arch in GENERATORS
        for recompute in ("pointwise", "none")
        if hasattr(MODEL_DATACLASS_REGISTRY[arch], "recompute")
    ],
)
def test_future_tokens_do_not_change_gradients_of_the_past(arch: str, recompute: str, seed: int) -> None:
    case = random_case(arch, seed)
    model = build(arch, {"init_std": 0.4, **case.flags, "recompute": recompute}, case.dictionary)
    model.load_state_dict(case.model.state_dict())
    # Without dropout, but with all that training keeps and recomputes.
    model.double().eval()
    tokens, changed, changed_at = case.with_another_future(3)
    before, after = (past_gradients(model, each, changed_at) for each in (tokens, changed))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)
