"""Models made ready for generation are copied and stored like any other, and never answer with a weight of old."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.ops.linear import Linear
from fairseq_ms.core.ops.lstm import LSTM, Steps
from fairseq_ms.core.ops.output import TiedOutput
from fairseq_ms.core.ops.packing import PackedWeight
from tests.registry import ARCHITECTURES, GENERATORS, random_case


def reread(linear: Linear) -> Linear:
    """What ``torch.load`` makes of ``torch.save``."""
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    with torch.serialization.safe_globals([Linear, PackedWeight, set]):
        return torch.load(file, weights_only=True)


COPIES: dict[str, Callable[[Linear], Linear]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": reread,
}


def grow(weight: Tensor) -> None:
    weight.mul_(2.0)


def one_entry(weight: Tensor) -> None:
    weight[1, 2] += 1.0


def through_numpy(weight: Tensor) -> None:
    weight.numpy()[0, 0] = 5.0


def fused(weight: Tensor) -> None:
    torch._foreach_add_([weight], 1.0)


WRITES = [grow, one_entry, through_numpy, fused]


@pytest.mark.parametrize("write", WRITES)
def test_a_weight_written_through_data_is_never_answered_with_the_packed_old_one(write: Callable) -> None:
    linear, x = Linear(6, 4), torch.randn(3, 6)
    linear.make_generation_fast_()
    with torch.no_grad():
        linear(x)
        write(linear.weight.data)
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


def test_data_that_is_replaced_or_was_taken_before_packing_is_followed() -> None:
    linear, x = Linear(6, 6), torch.randn(3, 6)
    taken = linear.weight.data
    linear.make_generation_fast_()
    with torch.no_grad():
        taken[0].zero_()
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
        for replacement in (torch.randn(6, 6), linear.weight.data.t()):
            linear.make_generation_fast_()
            linear.weight.data = replacement
            assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


def test_two_packed_copies_of_one_weight_both_follow_it() -> None:
    words, x = nn.Embedding(11, 6), torch.randn(2, 3, 6)
    outputs = [TiedOutput(words), TiedOutput(words)]
    with torch.no_grad():
        for output in outputs:
            output.make_generation_fast_()
        words.weight.data.mul_(3.0)
        outputs[1].make_generation_fast_()
        # 6 products in another order: each of the sums rounds by at most 2^-24 of what its terms add up to.
        rounding = 2 * 6 * 2.0**-24 * (x.abs() @ words.weight.abs().t()).max().item()
        for output in outputs:
            torch.testing.assert_close(output(x), x @ words.weight.t(), rtol=0.0, atol=rounding)


def test_reading_a_weight_leaves_its_packed_copy_in_use() -> None:
    linear, x = Linear(6, 4), torch.randn(3, 6)
    linear.make_generation_fast_()
    if linear.packed is None:
        assert not PackedWeight.supports(linear.weight)
        return
    with torch.no_grad():
        for read in (linear.state_dict, linear.weight.data.sum, lambda: F.embedding(torch.tensor([1]), linear.weight)):
            read()
        linear(x.requires_grad_()).sum()
        assert linear.packed.serves(x, linear.weight)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_follows_its_own_weight(how: str) -> None:
    linear, x = Linear(6, 4), torch.randn(3, 6)
    linear.make_generation_fast_()
    with torch.no_grad():
        expected = linear(x)
        copied = COPIES[how](linear)
        # The same products, packed or not.
        torch.testing.assert_close(copied(x), expected, rtol=0.0, atol=1e-6)
        copied.weight.data.zero_()
        assert torch.equal(copied(x), copied.bias.expand(3, 4))
        torch.testing.assert_close(linear(x), expected, rtol=0.0, atol=1e-6)


def test_a_deep_copy_is_packed_when_it_is_first_used() -> None:
    linear, x = Linear(6, 4), torch.randn(3, 6)
    linear.make_generation_fast_()
    copied = copy.deepcopy(linear)
    with torch.no_grad():
        if PackedWeight.supports(linear.weight):
            assert linear.packed is not None
            assert copied.packed is not None
            assert linear.packed.serves(x, linear.weight)
            assert copied.packed.serves(x, copied.weight)
        # The same products in the same order.
        assert torch.equal(copied(x), linear(x))
        if copied.packed is not None:
            assert not copied.packed.serves(x, linear.weight)


def test_a_weight_in_memory_that_others_may_write_to_is_not_packed() -> None:
    foreign = torch.ones(4, 6).numpy()
    for weight in (torch.from_numpy(foreign), torch.ones(4, 6).share_memory_()):
        linear = Linear(6, 4)
        linear.weight = nn.Parameter(weight)
        linear.make_generation_fast_()
        assert linear.packed is None


@pytest.mark.parametrize("arch", GENERATORS)
def test_generation_leaves_every_packed_weight_in_use(arch: str) -> None:
    case = random_case(arch, 1)
    case.model.make_generation_fast_()
    length = max(4, case.lengths())
    tokens = case.tokens(2, length)
    state: dict[str, Any] = {}
    with torch.no_grad():
        case.model(tokens)
        for end in range(1, length + 1):
            case.model.decoder(tokens[:, :end], incremental_state=state)
    packed = [module.packed for module in case.model.modules() if getattr(module, "packed", None) is not None]
    assert all(each.packed is not None for each in packed)
    assert packed or not PackedWeight.supports(torch.empty(2, 2))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_model_made_ready_for_generation_can_be_copied(arch: str, how: str) -> None:
    case = random_case(arch, 0)
    case.model.make_generation_fast_()
    tokens = case.tokens(2, max(2, case.lengths()))
    with torch.no_grad():
        expected = case.model(tokens)[0]
        with pytest.raises(RuntimeError, match="cannot train"):
            case.model.train()
        copied = COPIES[how](case.model)
        torch.save(case.model, io.BytesIO())
        # The same products, packed or not.
        torch.testing.assert_close(copied(tokens)[0], expected, rtol=0.0, atol=1e-5)
        with pytest.raises(RuntimeError, match="cannot train"):
            copied.train()
        for parameter in copied.parameters():
            parameter.data.zero_()
        assert copied(tokens)[0].ne(expected).any()
        # Whatever was written to the copy, the model is what it was; it may go on without packed weights.
        torch.testing.assert_close(case.model(tokens)[0], expected, rtol=0.0, atol=1e-5)


def test_an_lstm_follows_its_recurrent_weight() -> None:
    lstm = LSTM(3, 0, 4)
    lstm.make_generation_fast_()
    row_B, table_BI = torch.arange(2), torch.randn(2, 3)
    more = Steps(row_B, row_B, row_B, row_B, 2, more=True)
    with torch.no_grad():
        lstm.weights()[1].data.mul_(3.0)
        steps = []
        for model in (lstm, copy.deepcopy(lstm)):
            state = model.new_state(2, table_BI)
            model(table_BI, None, more, state)
            steps.append(model(table_BI, None, more, state))
        lstm.packed = None
        state = lstm.new_state(2, table_BI)
        lstm(table_BI, None, more, state)
        plain = lstm(table_BI, None, more, state)
    for step in steps:
        # 4 products in another order.
        torch.testing.assert_close(step, plain, rtol=0.0, atol=1e-6)
