"""A packed weight gives what the weight gives, follows its changes, and stands aside where it cannot help."""

import copy
import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from fairseq_ms.core.layers import TokenEmbedding
from fairseq_ms.core.ops.linear import TiedOutput, projection
from fairseq_ms.core.ops.lstm import LSTM, RaggedSteps
from fairseq_ms.core.steps.packing import PackedLinear, PackedWeight, inference, pack, pieces_of
from tests.registry import GENERATORS, random_case

# What oneDNN packs on this machine; bfloat16 takes instructions that not every CPU has.
PACKS = {torch.float32: True, torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(), torch.float64: False}


def fast(linear: nn.Linear) -> nn.Linear:
    """The same, packed."""
    pack(linear)
    return linear


def is_packed(linear: nn.Linear, x: torch.Tensor) -> bool:
    """Whether the product is that of the packed weight."""
    packed = vars(linear).get("forward")
    return isinstance(packed, PackedLinear) and packed.packed.serves(x, linear.weight)


@pytest.mark.parametrize("dtype", [dtype for dtype, packs in PACKS.items() if packs])
@pytest.mark.parametrize("shape", [(1, 1, 24), (8, 1, 24), (3, 17, 24), (2, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_projection_is_the_projection(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    linear = projection(24, 40, bias).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        plain = linear(x)
        assert is_packed(fast(linear), x)
        # 24 products in another order: rounding of float32, or one step of bfloat16's 8 bits.
        tolerance = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(linear(x), plain, rtol=tolerance, atol=tolerance)


def test_a_packed_weight_is_left_alone_by_gradients_and_not_used_for_another_type() -> None:
    linear, x = fast(projection(6, 4)), torch.randn(3, 6, requires_grad=True)
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(3, 6))
    assert "packed" not in "".join(linear.state_dict())
    with torch.no_grad():
        assert is_packed(linear, x)
        assert not is_packed(linear, x.double())


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda linear: linear.weight.mul_(2.0),
    "fused": lambda linear: torch._foreach_add_([linear.weight], 1.0),
    "replaced": lambda linear: setattr(linear, "weight", nn.Parameter(torch.randn(6, 6))),
    "data replaced": lambda linear: setattr(linear.weight, "data", torch.randn(6, 6)),
    "data transposed": lambda linear: setattr(linear.weight, "data", linear.weight.data.t()),
    "rounded": lambda linear: linear.bfloat16().float(),
    "moved": lambda linear: linear.double().float().weight.add_(1.0),
    "loaded": lambda linear: linear.load_state_dict(projection(6, 6).state_dict()),
    "trained": lambda linear: torch.optim.SGD(linear.parameters(), 0.5).step(),
}


def test_no_other_weight_comes_to_lie_where_a_packed_one_lay() -> None:
    linear, x = fast(projection(64, 64)), torch.randn(3, 64)
    with torch.no_grad():
        for value in range(9):
            # So the memory of the weight before is free to be taken again.
            linear.weight.data = torch.empty(0)
            linear.weight.data = torch.full((64, 64), float(value))
            torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_never_answered_with_the_packed_old_one(change: str) -> None:
    linear, x = fast(projection(6, 6)), torch.randn(3, 6)
    linear(x).sum().backward()
    with torch.no_grad():
        before = linear(x)
        CHANGES[change](linear)
        after = linear(x)
        # 6 products in another order.
        torch.testing.assert_close(after, F.linear(x, linear.weight, linear.bias), rtol=1e-6, atol=1e-6)
    assert (after - before).abs().max() > 1e-4


class Times(nn.Module):
    factor = 1.0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return self.factor * weight


def test_a_weight_that_is_computed_anew_where_another_one_lay_is_not_taken_for_that() -> None:
    linear, x, times = fast(projection(64, 64)), torch.randn(3, 64), Times()
    parametrize.register_parametrization(linear, "weight", times)
    with torch.no_grad():
        once = linear(x) - linear.bias
        for times.factor in range(9):
            # 64 products in another order.
            torch.testing.assert_close(linear(x), times.factor * once + linear.bias, rtol=1e-5, atol=1e-4)


def test_weights_are_packed_for_a_while_and_trained_afterwards() -> None:
    first, last, x = projection(6, 6), fast(projection(6, 4)), torch.randn(3, 6)
    model = nn.Sequential(first, nn.Linear(6, 6), last)
    with torch.no_grad():
        with inference(model):
            assert is_packed(first, x)
            assert not model.training
        assert model.training
        assert not is_packed(first, x)
        assert is_packed(last, x)
        first.weight.data.zero_()
        assert torch.equal(first(x), first.bias.expand(3, 6))


@pytest.mark.parametrize("why", ["no bfloat16", "no operators", "float64"])
def test_what_cannot_be_packed_is_left_as_it_is(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = fast(projection(6, 4)), torch.randn(3, 6)
    if why == "no bfloat16":
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
        assert PackedWeight.supports(linear.weight)
        linear, x = fast(linear.bfloat16()), x.bfloat16()
    elif why == "no operators":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        linear, x = fast(linear.double()), x.double()
    with torch.no_grad():
        assert not is_packed(linear, x)
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


def test_the_tied_output_follows_its_embedding() -> None:
    embed = TokenEmbedding(words := nn.Embedding(11, 6), None, 6)
    output = TiedOutput(embed)
    assert not list(output.parameters())
    pack(output)
    x = torch.randn(2, 3, 6)
    with torch.no_grad():
        # 6 products in another order.
        torch.testing.assert_close(output(x), x @ words.weight.t(), rtol=0.0, atol=1e-6)
        words.weight.mul_(3.0)
        torch.testing.assert_close(output(x), x @ words.weight.t(), rtol=0.0, atol=3e-6)


def test_an_lstm_follows_its_recurrent_weight() -> None:
    lstm = LSTM(3, 0, 4)
    row_B, table_BI = torch.arange(2), torch.randn(2, 3)
    more = RaggedSteps(row_B, row_B, row_B, row_B, 2, more=True)

    def second_step(model: LSTM) -> torch.Tensor:
        state = model.new_state(2, table_BI)
        model(table_BI, None, more, state)
        return model(table_BI, None, more, state)

    with torch.no_grad():
        pack(lstm)
        second_step(lstm)
        lstm.weights()[1].mul_(3.0)
        found = [second_step(lstm), second_step(copy.deepcopy(lstm))]
        del lstm.product
        for step in found:
            # 4 products in another order.
            torch.testing.assert_close(step, second_step(lstm), rtol=0.0, atol=1e-6)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_packed_when_it_is_first_used_and_follows_its_own_weight(how: str) -> None:
    linear, x = fast(projection(6, 4)), torch.randn(3, 6)
    with torch.no_grad():
        expected = linear(x)
        copied = COPIES[how](linear)
        # The same products in the same order.
        assert torch.equal(copied(x), expected)
        assert is_packed(copied, x)
        copied.weight.zero_()
        assert torch.equal(copied(x), copied.bias.expand(3, 4))
        assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("arch", GENERATORS)
def test_generation_packs_every_weight_once(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(arch, 1)
    case.model.make_generation_fast_()
    length = max(4, case.lengths())
    tokens = case.tokens(2, length)
    state: dict[str, Any] = {}
    packed: list[int] = []
    supports = PackedWeight.supports

    def noted(_: PackedWeight, weight: torch.Tensor) -> bool:
        packed.append(id(weight))
        return supports(weight)

    monkeypatch.setattr(PackedWeight, "supports", noted)
    with torch.no_grad():
        case.model(tokens)
        for end in range(1, length + 1):
            case.model.decoder(tokens[:, :end], incremental_state=state)
    assert packed
    assert len(packed) == len(set(packed))
    with pytest.raises(RuntimeError, match="cannot train"):
        case.model.train()


def test_every_number_of_rows_is_made_of_few() -> None:
    pieces = {rows: pieces_of(rows) for rows in range(5000)}
    assert all(sum(found) == rows for rows, found in pieces.items())
    assert len(set(itertools.chain(*pieces.values()))) == 17 + 8
    assert pieces[437] == [256, 128, 32, 16, 5]


def resident() -> float:
    """This process' memory in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_inputs_of_new_lengths_do_not_cost_memory() -> None:
    linear = fast(projection(16, 24))
    with torch.no_grad():
        assert linear(torch.ones(2, 0, 16)).shape == (2, 0, 24)
        linear(torch.ones(1, 512, 16))
        before = resident()
        for rows in range(1, 500):
            x = torch.randn(1, rows, 16)
            torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias), rtol=1e-5, atol=1e-5)
    # oneDNN's kernels for 500 numbers of rows take more than 200 MB where it has AVX-512.
    assert resident() - before < 25
