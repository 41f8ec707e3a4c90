"""What must hold for every architecture, over random configurations of each and all kernels of attention.

A new architecture is covered by being registered and having a module under ``tests/configs``.
"""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.helpers.operations import Operations
from tests.helpers.seeds import seeds
from tests.registry import GENERATORS, build, exact_case, random_case, setting

# What a kernel does not do (masks, a precision) torch's plain products do.
BACKENDS = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
every_kernel = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)

SEEDS = seeds(9, 50)
# float64, logits of order 1. A layer norm over the two numbers of the narrowest models amplifies rounding up to 300
# times, and there are up to a dozen of them.
CACHED_TOLERANCE = 1e-9
every_case = pytest.mark.parametrize("seed", SEEDS)


def preferring(backend: SDPBackend) -> AbstractContextManager[None]:
    """A context in which attention takes this kernel wherever it can."""
    kernels: AbstractContextManager[None] = sdpa_kernel([backend, SDPBackend.MATH], set_priority=True)
    return kernels


@pytest.fixture(autouse=True)
def _another_kernel_for_each_seed(request: pytest.FixtureRequest) -> Iterator[None]:
    with preferring(BACKENDS[request.node.callspec.params.get("seed", 0) % len(BACKENDS)]):
        yield


@every_case
@pytest.mark.parametrize("arch", GENERATORS)
def test_future_tokens_do_not_change_past_logits(arch: str, seed: int) -> None:
    case = exact_case(arch, seed)
    tokens, changed, changed_at = case.with_another_future(2)
    with torch.no_grad():
        before, after = case.model(tokens)[0], case.model(changed)[0]
    difference = (before - after).abs().amax((0, 2))
    assert difference[:changed_at].max() <= setting(arch, "TOLERANCE", 0.0)
    sees_it = setting(arch, "first_output_that_sees", lambda flags, position: position)(case.flags, changed_at)
    if sees_it < tokens.size(1):
        assert difference[sees_it:].max() > 0.0


@every_case
@pytest.mark.parametrize("arch", GENERATORS)
def test_probabilities_of_all_sequences_sum_to_one(arch: str, seed: int) -> None:
    case = random_case(arch, seed, symbols=1)
    model = case.model.double()
    length = case.rng.randint(1, 4)
    sequences = torch.tensor(list(itertools.product(range(len(case.dictionary)), repeat=length)))
    start = torch.full((sequences.size(0), 1), case.dictionary.eos())
    with torch.no_grad():
        output = model(torch.cat([start, sequences[:, :-1]], dim=1))
        log_probs = model.get_normalized_probs(output, log_probs=True).double()
    total = log_probs.gather(2, sequences.unsqueeze(2)).sum((1, 2)).exp().sum()
    # fairseq's log_softmax works in float32: up to 4 rounding errors of 6e-8 a sequence.
    assert total.item() == pytest.approx(1.0, abs=1e-6)


@every_case
@pytest.mark.parametrize("arch", GENERATORS)
def test_stepping_prefilling_and_the_full_forward_agree_under_beam_reorders(arch: str, seed: int) -> None:
    case = exact_case(arch, seed)
    length = case.lengths()
    tokens = case.tokens(3, length)
    prefix = case.rng.randint(1, length)
    state: dict = {}
    decoder = case.model.decoder
    with torch.no_grad():
        for end in range(prefix, length + 1):
            cached = decoder(tokens[:, :end], incremental_state=state)[0]
            full = case.model(tokens[:, :end])[0][:, -1:]
            torch.testing.assert_close(cached, full, rtol=0.0, atol=CACHED_TOLERANCE)
            # What beam search does, or twice: rows are permuted, repeated and dropped, then go on differently.
            for _ in range(case.rng.randint(1, 3)):
                order = torch.tensor([case.rng.randrange(tokens.size(0)) for _ in range(case.rng.randint(1, 4))])
                decoder.reorder_incremental_state_scripting(state, order)
                tokens = tokens[order]
            tokens = torch.cat([tokens[:, :end], case.tokens(tokens.size(0), length - end)], dim=1)


@every_case
@pytest.mark.parametrize("arch", GENERATORS)
def test_a_state_that_is_shown_other_tokens_starts_from_what_they_share(arch: str, seed: int) -> None:
    case = exact_case(arch, seed)
    length = max(3, case.lengths())
    first, second = case.tokens(2, length), case.tokens(2, length)
    shared = case.rng.randint(0, length - 1)
    second[:, :shared] = first[:, :shared]
    end = case.rng.randint(max(1, shared), length)
    state: dict = {}
    with torch.no_grad():
        for stop in range(1, length + 1):
            case.model.decoder(first[:, :stop], incremental_state=state)
        cached = case.model.decoder(second[:, :end], incremental_state=state)[0]
        full = case.model(second[:, :end])[0][:, -1:]
    torch.testing.assert_close(cached, full, rtol=0.0, atol=CACHED_TOLERANCE)


@every_case
@pytest.mark.parametrize("arch", GENERATORS)
def test_padding_on_the_right_changes_nothing(arch: str, seed: int) -> None:
    case = exact_case(arch, seed)
    length = case.lengths()
    tokens = case.tokens(2, length)
    padding = torch.full((2, case.rng.randint(1, 9)), case.dictionary.pad())
    lengths = torch.full((2,), length)
    with torch.no_grad():
        alone = case.model(tokens, src_lengths=lengths)[0]
        padded = case.model(torch.cat([tokens, padding], dim=1), src_lengths=lengths)[0]
    # Another length means other shapes, and so another order of summation.
    torch.testing.assert_close(padded[:, :length], alone, rtol=0.0, atol=CACHED_TOLERANCE)


@pytest.mark.cpu
@every_kernel
def test_attention_takes_the_kernel_that_is_preferred(backend: SDPBackend) -> None:
    case = random_case("vanilla_lm", 1)
    with torch.no_grad(), preferring(backend), Operations() as ran:
        case.model(case.tokens(2, case.lengths()))
    wanted = {"aten::_scaled_dot_product_flash_attention_for_cpu"} if backend == SDPBackend.FLASH_ATTENTION else set()
    assert {name for name in ran.names if "flash" in name} == wanted


@pytest.mark.parametrize("seed", seeds(2, 4))
@every_kernel
@pytest.mark.parametrize("arch", GENERATORS)
def test_future_tokens_do_not_change_past_logits_in_half_precision(arch: str, backend: SDPBackend, seed: int) -> None:
    case = random_case(arch, seed)
    case.model.to(torch.bfloat16)
    tokens, changed, changed_at = case.with_another_future(3)
    with torch.no_grad(), preferring(backend):
        before, after = case.model(tokens)[0], case.model(changed)[0]
    difference = (before - after).abs().amax((0, 2))
    # Chunks that a later token ends are computed beside others, so that rows are added up in another order.
    by_shape = 0.05 * before.abs().max().item() if setting(arch, "TOLERANCE", 0.0) else 0.0
    assert difference[:changed_at].max() <= by_shape


def past_gradients(model: torch.nn.Module, tokens: torch.Tensor, until: int) -> list[torch.Tensor]:
    """What the logits in front of a position say to the weights."""
    weights = torch.linspace(-1.0, 1.0, until, dtype=torch.float64)[None, :, None]
    loss = (model(tokens)[0][:, :until] * weights).square().sum()
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)]


@pytest.mark.parametrize("seed", seeds(2, 4))
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
        torch.testing.assert_close(one, other, rtol=CACHED_TOLERANCE, atol=CACHED_TOLERANCE)
