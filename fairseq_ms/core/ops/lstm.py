"""An LSTM over sequences of unequal lengths, without padding, whose repeated inputs are projected once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from fairseq_ms.core.ops.plain import plain
from fairseq_ms.core.ops.recompute import refuse_second_derivatives

_sigmoid_backward, _tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


@dataclass(frozen=True)
class RaggedSteps:
    """The Q steps of W sequences of unequal lengths, none of them empty, in any order.

    Attributes:
        symbol_Q: row of the table that each step reads.
        sequence_Q: the sequence it belongs to, from 0.
        place_Q: its place in that sequence, from 0.
        slot_Q: row of the result that is the step's, each at most once.
        slots: rows Z of the result; those that no step fills are zero.
        kept_B: the sequences that go on in the rows of a state; None for all.
        more: whether each is one more step of a row of a state, which ``sequence_Q`` then names.
    """

    symbol_Q: Tensor
    sequence_Q: Tensor
    place_Q: Tensor
    slot_Q: Tensor
    slots: int
    kept_B: Tensor | None = None
    more: bool = False

    @cached_property
    def lengths_W(self) -> Tensor:
        """Steps of each sequence."""
        return torch.bincount(self.sequence_Q)

    @cached_property
    def order_W(self) -> Tensor:
        """The sequences by decreasing length, ties in their given order."""
        return torch.argsort(self.lengths_W, descending=True, stable=True)

    @cached_property
    def rectangles(self) -> list[tuple[int, int]]:
        """(How many sequences have a length, that length), the longest first."""
        # All later shapes depend on the data, so the host has to know the lengths: one transfer.
        counts = torch.bincount(self.lengths_W).tolist()
        assert not counts or counts[0] == 0, "every sequence must have a step"
        return [(count, length) for length, count in reversed([*enumerate(counts)]) if count]

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """How many sequences have a step s, for every s."""
        longest = self.rectangles[0][1] if self.rectangles else 0
        return tuple(sum(count for count, length in self.rectangles if length > step) for step in range(longest))

    @cached_property
    def rank_W(self) -> Tensor:
        """The place of each sequence in ``order_W``."""
        rank_W = torch.empty_like(self.order_W)
        rank_W[self.order_W] = torch.arange(rank_W.numel(), device=rank_W.device)
        return rank_W

    def one_by_one(self) -> Tensor:
        """Row of each step where whole sequences lie one after the other, in ``order_W``."""
        sorted_W = self.lengths_W[self.order_W]
        return (sorted_W.cumsum(0) - sorted_W)[self.rank_W[self.sequence_Q]] + self.place_Q

    def step_major(self) -> Tensor:
        """Row of each step where step 0 of all sequences comes first, in ``order_W``, then step 1 and so on."""
        return self._starts()[self.place_Q] + self.rank_W[self.sequence_Q]

    def last(self) -> Tensor:
        """Row in the step-major layout of the last step of each sequence."""
        return self._starts()[self.lengths_W - 1] + self.rank_W

    def _starts(self) -> Tensor:
        sizes = torch.tensor(self.batch_sizes, device=self.place_Q.device, dtype=torch.long)
        return sizes.cumsum(0) - sizes


@dataclass
class LSTMState:
    """The state of an LSTM in every row of a batch.

    Attributes:
        hidden_BU, cell_BU: the states, (B, U) each.
        context_BG: what a context that stays the same adds to the gates of each row, (B, 4U); None for no context.
        table_RG: the table, projected to the gates, where all steps read one; weights do not change meanwhile.
    """

    hidden_BU: Tensor
    cell_BU: Tensor
    context_BG: Tensor | None = None
    table_RG: Tensor | None = None

    def begin(self, rows_R: Tensor, context_RG: Tensor) -> None:
        """Let some rows begin anew, with a new context."""
        assert self.context_BG is not None
        self.context_BG = self.context_BG.index_copy(0, rows_R, context_RG)
        self.hidden_BU, self.cell_BU = (x_BU.index_fill(0, rows_R, 0.0) for x_BU in (self.hidden_BU, self.cell_BU))

    def at(self, rows_R: Tensor) -> LSTMState:
        """The state of some rows."""
        context_RG = None if self.context_BG is None else self.context_BG[rows_R]
        return LSTMState(self.hidden_BU[rows_R], self.cell_BU[rows_R], context_RG, self.table_RG)

    def reorder(self, order: Tensor) -> None:
        moved = self.at(order)
        self.hidden_BU, self.cell_BU, self.context_BG = moved.hidden_BU, moved.cell_BU, moved.context_BG


class CappedLSTM(nn.LSTM):
    """One layer whose input gate is held at most at 1 - forget gate, which keeps the cell between -1 and 1.

    HAED, Appendix A. It is called as torch's is, with sequences from their beginning or one more step of each.
    """

    def forward(self, x: Any, state: Any = None) -> Any:
        """A ``PackedSequence``, or (W, 1, I) after a state -> what ``nn.LSTM`` returns of them."""
        weight_GI, weight_GU, *biases = self.all_weights[0]
        if state is not None:
            (hidden_1WU, cell_1WU), bias_G = state, biases[0] + biases[1]
            gates_WG = F.linear(x[:, 0], weight_GI, bias_G) + F.linear(hidden_1WU[0], weight_GU)
            hidden_WU, cell_WU = _cell(gates_WG, cell_1WU[0], capped=True)
            return hidden_WU.unsqueeze(1), (hidden_WU.unsqueeze(0), cell_WU.unsqueeze(0))
        gates_QG, sizes_S = F.linear(x.data, weight_GI, biases[0] + biases[1]), x.batch_sizes.to(x.data.device)
        row_Q = torch.arange(len(gates_QG), device=sizes_S.device)
        sequence_W = row_Q[: x.batch_sizes[0]]
        hidden_QU, cell_QU = _Recurrence.apply(gates_QG, None, weight_GU, row_Q, tuple(x.batch_sizes.tolist()), True)
        last_W = (sizes_S.cumsum(0) - sizes_S)[(sizes_S[:, None] > sequence_W).sum(0) - 1] + sequence_W
        return PackedSequence(hidden_QU, x.batch_sizes), (hidden_QU[last_W].unsqueeze(0), cell_QU[last_W].unsqueeze(0))


class LSTM(nn.Module):
    """One LSTM layer whose input is a row of a table next to a vector that stays the same for a whole sequence.

    The input of step s of sequence w is ``[table[symbol(w, s)], context[w]]``: a decoder's characters beside what the
    main model says about the chunk. A symbol occurs many times and a context serves a whole chunk, so both are
    projected to the gates once and the projections are looked up. The naive twins are torch's own ``nn.LSTM`` and, for
    the capped gate, a loop over steps (``tests/references/hierarchical.py``).

    Args:
        table_dim: width I of the table.
        context_dim: width D of the context, 0 for none.
        units: hidden units U.
        capped: have the cell of a ``CappedLSTM``.
    """

    def __init__(self, table_dim: int, context_dim: int, units: int, capped: bool = False) -> None:
        super().__init__()
        self.units = units
        self.table_dim, self.context_dim = table_dim, context_dim
        self.capped = capped
        # torch's own module owns the parameters: cuDNN wants them in its layout, and its padded call is the naive twin.
        self.cell = (CappedLSTM if capped else nn.LSTM)(table_dim + context_dim, units, batch_first=True)

    def forward(
        self, table_RI: Tensor, context_WD: Tensor | None, steps: RaggedSteps, state: LSTMState | None = None
    ) -> Tensor:
        """Hidden states (Z, U) of all steps; a table (R, I) and one context (W, D) a sequence.

        Sequences begin at zero. With a state, its rows then go on with those that ``steps`` keeps; where the steps
        are more of its rows, they continue these, without gradients, and the context is the state's own.
        """
        if steps.more:
            assert state is not None
            return self._one_more(table_RI, steps, state)
        at_Q = steps.step_major()
        symbol_Q, slot_Q = (torch.empty_like(x_Q).index_copy_(0, at_Q, x_Q) for x_Q in (steps.symbol_Q, steps.slot_Q))
        context_WD = None if context_WD is None else context_WD.index_select(0, steps.order_W)
        called = not plain(self.cell, nn.LSTM, CappedLSTM) or (table_RI.is_cuda and not self.capped)
        run = self._by_cell if called else self._by_hand
        hidden_QU, last_WU, cell_WU = run(table_RI, symbol_Q, context_WD, steps)
        if state is not None:
            kept = slice(None) if steps.kept_B is None else steps.kept_B
            state.hidden_BU, state.cell_BU = last_WU.detach()[kept], cell_WU.detach()[kept]
        # Unlike ``index_copy``, this does not keep the hidden states for backward.
        return hidden_QU.new_zeros(steps.slots, self.units).index_put((slot_Q,), hidden_QU)

    def weights(self) -> list[Tensor]:
        """From the input (4U, I + D), from the hidden state (4U, U), and two biases (4U,): gates i, f, g, o."""
        return list(self.cell.all_weights[0])

    def project_table(self, table_RI: Tensor) -> Tensor:
        """What each row of the table adds to the gates, biases included: (R, I) to (R, 4U).

        Table and context stay as they are where the cell is called with them.
        """
        if not plain(self.cell, nn.LSTM, CappedLSTM):
            return table_RI
        weight, _, *biases = self.weights()
        return F.linear(table_RI, weight[:, : self.table_dim], biases[0] + biases[1])

    def project_context(self, context_WD: Tensor) -> Tensor:
        """What each context adds to the gates: (W, D) to (W, 4U)."""
        return (
            F.linear(context_WD, self.weights()[0][:, self.table_dim :])
            if plain(self.cell, nn.LSTM, CappedLSTM)
            else context_WD
        )

    def new_state(self, rows: int, like: Tensor) -> LSTMState:
        """The zero state of a number of rows, of the type and on the device of ``like``."""
        return LSTMState(like.new_zeros(rows, self.units), like.new_zeros(rows, self.units))

    def new_state_of_table(self, rows: int, table_RI: Tensor) -> LSTMState:
        """The zero state, with a context, of rows that read the same table at every step."""
        state, table_RG = self.new_state(rows, table_RI), self.project_table(table_RI).detach()
        width = 4 * self.units if plain(self.cell, nn.LSTM, CappedLSTM) else self.context_dim
        return replace(state, context_BG=table_RG.new_zeros(rows, width), table_RG=table_RG)

    def _one_more(self, table_RI: Tensor, steps: RaggedSteps, state: LSTMState) -> Tensor:
        """One step of the rows ``steps.sequence_Q``, to their new hidden states (Q, U)."""
        rows_Q = steps.sequence_Q
        some = state.at(rows_Q)
        table_RG = self.project_table(table_RI) if state.table_RG is None else state.table_RG
        x_QG = table_RG.index_select(0, steps.symbol_Q)
        if plain(self.cell, nn.LSTM, CappedLSTM):
            gates_QG = x_QG if some.context_BG is None else x_QG + some.context_BG
            gates_QG = gates_QG + F.linear(some.hidden_BU, self.weights()[1])
            hidden_QU, cell_QU = _cell(gates_QG, some.cell_BU, self.capped)
            out_QU = hidden_QU
        else:
            x_QI = x_QG if some.context_BG is None else torch.cat([x_QG, some.context_BG], dim=1)
            before = some.hidden_BU.unsqueeze(0), some.cell_BU.unsqueeze(0)
            out_Q1U, ((hidden_QU,), (cell_QU,)) = self.cell(x_QI.unsqueeze(1), before)
            out_QU = out_Q1U.squeeze(1)
        state.hidden_BU = state.hidden_BU.index_copy(0, rows_Q, hidden_QU)
        state.cell_BU = state.cell_BU.index_copy(0, rows_Q, cell_QU)
        return out_QU

    def _by_hand(
        self, table_RI: Tensor, symbol_Q: Tensor, context_WD: Tensor | None, steps: RaggedSteps
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Step-major hidden states (Q, U), and hidden states and cells (W, U) after each sequence.

        Symbols are step-major, contexts in ``steps.order_W``.
        """
        gates_WG = None if context_WD is None else self.project_context(context_WD)
        weight = self.weights()[1]
        gates_RG = self.project_table(table_RI).to(weight.dtype)
        sizes = steps.batch_sizes
        hidden_QU, cell_QU = _Recurrence.apply(gates_RG, gates_WG, weight, symbol_Q, sizes, self.capped)
        return hidden_QU, hidden_QU.detach().index_select(0, steps.last()), cell_QU.index_select(0, steps.last())

    def _by_cell(
        self, table_RI: Tensor, symbol_Q: Tensor, context_WD: Tensor | None, steps: RaggedSteps
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same by a call of the cell, which is fused on devices that have one, or wrapped."""
        x_QI = F.embedding(symbol_Q, table_RI)
        if context_WD is not None:
            x_QI = torch.cat([x_QI, torch.cat([context_WD[:size] for size in steps.batch_sizes])], dim=1)
        x = PackedSequence(x_QI, torch.tensor(steps.batch_sizes, device="cpu"))
        (hidden_QU, *_), states = self.cell(x)
        last_WU, cell_WU = (state_1WU[0].index_select(0, steps.rank_W) for state_1WU in states)
        # Under autocast cuDNN runs in float16, whichever type that has, and bfloat16 does not mix with it.
        dtype = next(self.cell.parameters(), table_RI).dtype
        return hidden_QU.to(dtype), last_WU.to(dtype), cell_WU.to(dtype)


def _cell(gates: Tensor, before: Tensor, capped: bool) -> tuple[Tensor, Tensor]:
    """One step: hidden states and cells (B, U), from gates (B, 4U), which are activated in place, and cells before."""
    i, f, g, o = gates.chunk(4, dim=1)
    gates[:, : 2 * before.shape[1]].sigmoid_()
    g.tanh_()
    o.sigmoid_()
    cell = torch.addcmul((torch.minimum(i, 1 - f) if capped else i) * g, f, before)
    return o * cell.tanh(), cell


class _Recurrence(torch.autograd.Function):
    """The recurrence over step-major gates; keeps the activated gates and the cells, 5U numbers a step."""

    @staticmethod
    def forward(ctx, table_RG, context_WG, weight_GU, symbol_Q, sizes, capped):
        gates_QG = table_RG.index_select(0, symbol_Q)
        hidden_QU, cell_QU = (gates_QG.new_empty(len(gates_QG), weight_GU.shape[1]) for _ in range(2))
        h, c = None, gates_QG.new_zeros(sizes[0], weight_GU.shape[1])
        for size, rows in zip(sizes, _rows(sizes)):
            gates = gates_QG[rows]
            if context_WG is not None:
                gates += context_WG[:size]
            if h is not None:
                gates.addmm_(h[:size], weight_GU.t())
            hidden_QU[rows], cell_QU[rows] = h, c = _cell(gates, c[:size], capped)
        ctx.sizes, ctx.capped, ctx.has_context = sizes, capped, context_WG is not None
        ctx.table_rows = table_RG.shape[0]
        ctx.save_for_backward(gates_QG, cell_QU, weight_GU, symbol_Q)
        ctx.mark_non_differentiable(cell_QU)
        return hidden_QU, cell_QU

    @staticmethod
    def backward(ctx, grad_QU, _grad_cells):
        refuse_second_derivatives("an LSTM")
        gates_QG, cell_QU, weight_GU, symbol_Q = ctx.saved_tensors
        grad_gates_QG, before_QU = torch.empty_like(gates_QG), torch.empty_like(cell_QU)
        most, units = ctx.sizes[0], weight_GU.shape[1]
        grad_context_WG = gates_QG.new_zeros(most, 4 * units) if ctx.has_context else None
        # Of a step's states by the step after it; nothing for sequences that end here.
        grad_h_WU, grad_c_WU, nothing_WU = gates_QG.new_zeros(3, most, units).unbind(0)
        rows = _rows(ctx.sizes)
        for step, size in reversed([*enumerate(ctx.sizes)]):
            i, f, g, o = gates_QG[rows[step]].chunk(4, dim=1)
            before = cell_QU[rows[step - 1]][:size] if step else nothing_WU
            tanh_c = cell_QU[rows[step]].tanh()
            if step + 1 < len(rows):
                before_QU[rows[step + 1]] = (o * tanh_c)[: ctx.sizes[step + 1]]
            dh = grad_QU[rows[step]] + grad_h_WU[:size]
            dc = _tanh_backward(dh * o, tanh_c) + grad_c_WU[:size]
            di, df, capped_i = dc * g, dc * before, i
            if ctx.capped:
                over = i > 1 - f
                di, df, capped_i = di.masked_fill(over, 0.0), df - di * over, torch.where(over, 1 - f, i)
            grads = _sigmoid_backward(di, i), _sigmoid_backward(df, f), _tanh_backward(dc * capped_i, g)
            grad_gates = grad_gates_QG[rows[step]]
            torch.cat([*grads, _sigmoid_backward(dh * tanh_c, o)], dim=1, out=grad_gates)
            grad_c_WU[:size] = dc * f
            if grad_context_WG is not None:
                grad_context_WG[:size] += grad_gates
            if step:
                torch.mm(grad_gates, weight_GU, out=grad_h_WU[:size])
        grad_weight_GU = grad_gates_QG[most:].t() @ before_QU[most:]
        grad_table_RG = gates_QG.new_zeros(ctx.table_rows, 4 * units).index_add_(0, symbol_Q, grad_gates_QG)
        return grad_table_RG, grad_context_WG, grad_weight_GU, None, None, None


def _rows(sizes: tuple[int, ...]) -> list[slice]:
    """The rows of every step, in the step-major layout."""
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes)]
