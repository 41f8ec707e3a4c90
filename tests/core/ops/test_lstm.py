"""An LSTM over sequences without padding against torch's over padded ones."""

from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fairseq_ms.core.ops.lstm import LSTM, CappedLSTM, RaggedSteps


def reading_order(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For every token in reading order, its sequence and its step."""
    sequence = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    return sequence, torch.cat([torch.arange(int(length)) for length in lengths])


@pytest.mark.parametrize("path", ["_by_hand", "_by_cell"])
@pytest.mark.parametrize("context_dim", [0, 5])
def test_lstm_without_padding_equals_torch_on_padded_input(
    context_dim: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = torch.tensor([3, 1, 7, 3, 2])
    sequence, step = reading_order(lengths)
    total = int(lengths.sum())
    lstm = LSTM(4, context_dim, 6).double()
    # The fused call runs without a GPU too.
    monkeypatch.setattr(lstm, "_by_hand", getattr(lstm, path))
    table = torch.randn(9, 4, dtype=torch.double, requires_grad=True)
    context = torch.randn(5, context_dim, dtype=torch.double, requires_grad=True)
    symbols = torch.randint(0, 9, (total,))
    steps = RaggedSteps(symbols, sequence, step, torch.arange(total), total + 2)
    for layout in (steps.step_major(), steps.one_by_one()):
        assert sorted(layout.tolist()) == list(range(total))
    assert sum(steps.batch_sizes) == sum(count * length for count, length in steps.rectangles) == total
    state = lstm.new_state(5, table)
    hidden = lstm(table, context if context_dim else None, steps, state)
    some = replace(steps, kept_B=torch.tensor([4, 1]))
    lstm(table, context if context_dim else None, some, kept := lstm.new_state(2, table))
    assert torch.equal(kept.cell_BU, state.cell_BU[[4, 1]])
    assert torch.equal(kept.hidden_BU, state.hidden_BU[[4, 1]])
    assert torch.equal(hidden, lstm(table, context if context_dim else None, steps))
    assert not hidden[total:].any()

    padded = torch.zeros(5, 7, 4 + context_dim, dtype=torch.double)
    padded = padded.index_put((sequence, step), torch.cat([table[symbols], context[sequence]], dim=1))
    in_torch, (_, last) = lstm.cell(pack_padded_sequence(padded, lengths.cpu(), batch_first=True, enforce_sorted=False))
    expected = pad_packed_sequence(in_torch, batch_first=True)[0][sequence, step]
    torch.testing.assert_close(hidden[:total], expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state.cell_BU, last[0], rtol=1e-12, atol=1e-13)
    assert torch.equal(state.hidden_BU, hidden[lengths.cumsum(0) - 1])

    weights = torch.randn_like(expected)
    wanted = [table, *([context] if context_dim else []), *lstm.parameters()]
    ours = torch.autograd.grad((hidden[:total] * weights).sum(), wanted)
    theirs = torch.autograd.grad((expected * weights).sum(), wanted)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_fused_call_in_half_precision_gives_states_of_the_type_of_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lstm, (sequence, step) = LSTM(4, 0, 6), reading_order(torch.tensor([3, 1]))
    fused = lstm.cell.forward

    def halved(x: PackedSequence) -> tuple[PackedSequence, tuple[torch.Tensor, torch.Tensor]]:
        y, (h, c) = fused(x)
        return y._replace(data=y.data.half()), (h.half(), c.half())

    # As autocast runs cuDNN's.
    monkeypatch.setattr(lstm.cell, "forward", halved)
    monkeypatch.setattr(lstm, "_by_hand", lstm._by_cell)
    state = lstm.new_state(2, table := torch.randn(9, 4))
    hidden = lstm(table, None, RaggedSteps(step, sequence, step, torch.arange(4), 4), state)
    assert hidden.dtype == state.hidden_BU.dtype == state.cell_BU.dtype == torch.float32


def test_what_a_capped_lstm_makes_lies_where_its_input_does() -> None:
    lstm, x = CappedLSTM(3, 4), pack_padded_sequence(torch.randn(5, 2, 3), torch.tensor([5, 3]))
    expected, (hidden, _) = lstm(x)
    with torch.device("meta"):
        found, (its_hidden, _) = lstm(x)
    assert found.data.equal(expected.data)
    assert its_hidden.equal(hidden)
