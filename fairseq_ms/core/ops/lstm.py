"""An LSTM over sequences of unequal lengths without padding, which projects repeated inputs once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from fairseq_ms.core.ops.recompute import plain, refuse_second_derivatives

_sigmoid_backward, _tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


@dataclass(frozen=True)
class RaggedSteps:
    """The Q steps, in any order, of W sequences of unequal lengths, none of them empty.

    Attributes:
        symbol_Q: the row of the table that each step reads
        sequence_Q: its sequence, from 0
        place_Q: its place in the sequence, from 0
        slot_Q: its row in the result; no two share one
        slots: rows Z of the result, zero where no step writes
        kept_B: the sequences that go on in the rows of a state; None for all
        more: whether each is one more step in row ``sequence_Q`` of a state
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
        """The sequences by decreasing length, in a stable order."""
        return torch.argsort(self.lengths_W, descending=True, stable=True)

    @cached_property
    def rectangles(self) -> list[tuple[int, int]]:
        """(Number of sequences, their length), the longest first."""
        # One transfer to the host, since all later shapes depend on the lengths.
        counts = torch.bincount(self.lengths_W).tolist()
        assert not counts or counts[0] == 0, "every sequence must have a step"
        return [(count, length) for length, count in reversed([*enumerate(counts)]) if count]

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """How many sequences have a step s, for each s."""
        longest = self.rectangles[0][1] if self.rectangles else 0
        return tuple(sum(count for count, length in self.rectangles if length > step) for step in range(longest))

    @cached_property
    def rank_W(self) -> Tensor:
        """The place of each sequence in ``order_W``."""
        rank_W = torch.empty_like(self.order_W)
        rank_W[self.order_W] = torch.arange(rank_W.numel(), device=rank_W.device)
        return rank_W

    def one_by_one(self) -> Tensor:
        """The row of each step where sequences lie one after the other, in ``order_W``."""
        sorted_W = self.lengths_W[self.order_W]
        return (sorted_W.cumsum(0) - sorted_W)[self.rank_W[self.sequence_Q]] + self.place_Q

    def step_major(self) -> Tensor:
        """The row of each step in step-major order: step 0 of all sequences, in ``order_W``, then step 1 and so on."""
        return self._starts()[self.place_Q] + self.rank_W[self.sequence_Q]

    def last(self) -> Tensor:
        """The step-major row of each sequence's last step."""
        return self._starts()[self.lengths_W - 1] + self.rank_W

    def _starts(self) -> Tensor:
        sizes = torch.tensor(self.batch_sizes, device=self.place_Q.device, dtype=torch.long)
        return sizes.cumsum(0) - sizes


@dataclass
class LSTMState:
    """The state of an LSTM in every row of a batch.

    Attributes:
        hidden_BU, cell_BU: hidden states and cells
        context_BG: ``LSTM.project_context`` of each row's context, or None without contexts
        table_RG: ``LSTM.project_table`` of the table, if all steps read the same one
    """

    hidden_BU: Tensor
    cell_BU: Tensor
    context_BG: Tensor | None = None
    table_RG: Tensor | None = None

    def begin(self, rows_R: Tensor, context_RG: Tensor) -> None:
        """Begin sequences in some rows, with a new context."""
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
    """One layer whose input gate is at most 1 - forget gate, so that cells stay within -1 and 1 (HAED, Appendix A).

    Called like torch's, with sequences from their beginning or with one more step of each.
    """

    def forward(self, x: Any, state: Any = None) -> Any:
        """As ``nn.LSTM`` of a ``PackedSequence``, or of (W, 1, I) after a state."""
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
    """One LSTM layer whose inputs are rows of a table, each concatenated with a context of the whole sequence.

    Step s of sequence w reads ``[table[symbol(w, s)], context[w]]``: in a decoder, a character and the main output of
    the chunk. Table and contexts are projected to the gates once, and the projections are looked up. The naive twins
    are ``nn.LSTM`` and, for the capped gate, a loop over steps (``tests/references/hierarchical.py``). A context of
    width 0 is none.
    """

    def __init__(self, table_dim: int, context_dim: int, units: int, capped: bool = False) -> None:
        super().__init__()
        self.units = units
        self.table_dim, self.context_dim = table_dim, context_dim
        self.capped = capped
        # torch's module owns the parameters, since cuDNN wants them in its layout.
        self.cell = (CappedLSTM if capped else nn.LSTM)(table_dim + context_dim, units, batch_first=True)

    def forward(
        self, table_RI: Tensor, context_WD: Tensor | None, steps: RaggedSteps, state: LSTMState | None = None
    ) -> Tensor:
        """Table (R, I) and one context a sequence (W, D) -> hidden states (Z, U) of all steps.

        Sequences begin at zero, and a state takes in the ends of those that ``steps.kept_B`` names. Steps that are
        ``more`` continue the rows of the state, with its contexts and without gradients.
        """
        if steps.more:
            assert state is not None
            return self._one_more(table_RI, steps, state)
        at_Q = steps.step_major()
        symbol_Q, slot_Q = (torch.empty_like(x_Q).index_copy_(0, at_Q, x_Q) for x_Q in (steps.symbol_Q, steps.slot_Q))
        context_WD = None if context_WD is None else context_WD.index_select(0, steps.order_W)
        called = not self.is_plain or (table_RI.is_cuda and not self.capped)
        run = self._by_cell if called else self._by_hand
        hidden_QU, last_WU, cell_WU = run(table_RI, symbol_Q, context_WD, steps)
        if state is not None:
            kept = slice(None) if steps.kept_B is None else steps.kept_B
            state.hidden_BU, state.cell_BU = last_WU.detach()[kept], cell_WU.detach()[kept]
        # Unlike ``index_copy``, this does not keep the hidden states for backward.
        return hidden_QU.new_zeros(steps.slots, self.units).index_put((slot_Q,), hidden_QU)

    @property
    def is_plain(self) -> bool:
        """Whether operations on the cell's weights may replace a call of it (``recompute.plain``)."""
        return plain(self.cell, nn.LSTM, CappedLSTM)

    def weights(self) -> list[Tensor]:
        """Weights of the input (4U, I + D) and the hidden state (4U, U), and two biases (4U,); gates i, f, g, o."""
        return list(self.cell.all_weights[0])

    def project_table(self, table_RI: Tensor) -> Tensor:
        """The table's part of the gates, with biases, (R, I) -> (R, 4U); the table itself if the cell is not plain."""
        if not self.is_plain:
            return table_RI
        weight, _, *biases = self.weights()
        return F.linear(table_RI, weight[:, : self.table_dim], biases[0] + biases[1])

    def project_context(self, context_WD: Tensor) -> Tensor:
        """The contexts' part of the gates, (W, D) -> (W, 4U); the contexts themselves if the cell is not plain."""
        return F.linear(context_WD, self.weights()[0][:, self.table_dim :]) if self.is_plain else context_WD

    def new_state(self, rows: int, like: Tensor) -> LSTMState:
        """A state of zeros for so many rows, of the type and on the device of ``like``."""
        return LSTMState(like.new_zeros(rows, self.units), like.new_zeros(rows, self.units))

    def new_state_of_table(self, rows: int, table_RI: Tensor) -> LSTMState:
        """A state of zeros, contexts included, for rows that read the same table at every step."""
        state, table_RG = self.new_state(rows, table_RI), self.project_table(table_RI).detach()
        width = 4 * self.units if self.is_plain else self.context_dim
        return replace(state, context_BG=table_RG.new_zeros(rows, width), table_RG=table_RG)

    def _one_more(self, table_RI: Tensor, steps: RaggedSteps, state: LSTMState) -> Tensor:
        """One more step of the rows ``steps.sequence_Q``: their new hidden states (Q, U)."""
        rows_Q = steps.sequence_Q
        some = state.at(rows_Q)
        table_RG = self.project_table(table_RI) if state.table_RG is None else state.table_RG
        x_QG = table_RG.index_select(0, steps.symbol_Q)
        if self.is_plain:
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
        """Step-major hidden states (Q, U), and the last hidden states and cells (W, U) of sequences.

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
        """As ``_by_hand``, by a call of the cell: cuDNN's kernel, or a cell with adapters or hooks."""
        x_QI = F.embedding(symbol_Q, table_RI)
        if context_WD is not None:
            x_QI = torch.cat([x_QI, torch.cat([context_WD[:size] for size in steps.batch_sizes])], dim=1)
        x = PackedSequence(x_QI, torch.tensor(steps.batch_sizes, device="cpu"))
        (hidden_QU, *_), states = self.cell(x)
        last_WU, cell_WU = (state_1WU[0].index_select(0, steps.rank_W) for state_1WU in states)
        # Under autocast cuDNN runs in float16, even where autocast is to bfloat16.
        dtype = next(self.cell.parameters(), table_RI).dtype
        return hidden_QU.to(dtype), last_WU.to(dtype), cell_WU.to(dtype)


def _cell(gates: Tensor, before: Tensor, capped: bool) -> tuple[Tensor, Tensor]:
    """One step: gates (B, 4U), activated in place, and cells before -> hidden states and cells (B, U)."""
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
        # Gradients of a step's states from the step after it; zero for sequences that end here.
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
    """The step-major rows of each step."""
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes)]
