"""An LSTM over sequences of unequal lengths, packed by length, whose repeated inputs are projected once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from fairseq_ms.core.ops.packing import PackedWeight, pack


@dataclass(frozen=True)
class Packing:
    """Sequences of different lengths laid out step-major: step 0 of all of them, then step 1 of those that have one.

    Attributes:
        order_M: the sequences by decreasing length (ties in their given order).
        rank_M: the place of each sequence in that order.
        lengths_M: their lengths as given, each at least 1.
        batch_sizes: how many sequences have a step s, for every s.
    """

    order_M: Tensor
    rank_M: Tensor
    lengths_M: Tensor
    batch_sizes: tuple[int, ...]

    @classmethod
    def of(cls, lengths_M: Tensor) -> Packing:
        """Pack M sequences of the given lengths."""
        order_M = torch.argsort(lengths_M, descending=True, stable=True)
        rank_M = torch.empty_like(order_M)
        rank_M[order_M] = torch.arange(order_M.numel(), device=order_M.device)
        # The shapes of all that follows depend on the data, so the lengths have to be known on the host: one transfer.
        count_S = torch.bincount(lengths_M).tolist()
        assert not count_S or count_S[0] == 0, "an empty sequence cannot be packed"
        longer, sizes = lengths_M.numel(), []
        for count in count_S[:-1]:
            longer -= count
            sizes.append(longer)
        return cls(order_M, rank_M, lengths_M, tuple(sizes))

    def place(self, sequence_P: Tensor, step_P: Tensor) -> Tensor:
        """Row in the packed layout of step ``step_P`` of sequence ``sequence_P``."""
        sizes_S = torch.tensor(self.batch_sizes, device=step_P.device, dtype=torch.long)
        return (sizes_S.cumsum(0) - sizes_S)[step_P] + self.rank_M[sequence_P]

    def last(self) -> Tensor:
        """Row in the packed layout of the last step of each of the M sequences."""
        return self.place(torch.arange(self.rank_M.numel(), device=self.rank_M.device), self.lengths_M - 1)


@dataclass(frozen=True)
class Steps:
    """The P steps of all sequences of a batch, in any order.

    Attributes:
        symbol_P: row of the table that each step reads.
        sequence_P: the sequence it belongs to, from 0; none of the M sequences is empty.
        step_P: its place in that sequence, from 0.
        slot_P: row of the result that its hidden state is written to, each at most once.
        slots: rows F of the result; those that no step fills are zero.
    """

    symbol_P: Tensor
    sequence_P: Tensor
    step_P: Tensor
    slot_P: Tensor
    slots: int


@dataclass
class LSTMState:
    """Hidden and cell state of every row, (B, U) each, changed in place by ``LSTM.step``."""

    hidden_BU: Tensor
    cell_BU: Tensor

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        self.hidden_BU = self.hidden_BU.index_select(0, order)
        self.cell_BU = self.cell_BU.index_select(0, order)


class LSTM(nn.Module):
    """One LSTM layer whose input is a row of a table next to a vector that stays the same for a whole sequence.

    The input of step s of sequence m is ``[table[symbol(m, s)], context[m]]``: a decoder's characters beside what the
    main model says about the chunk. A symbol occurs many times and a context serves a whole chunk, so both are
    projected to the gates once and the projections are looked up. The naive twins are torch's own ``nn.LSTM`` and, for
    the capped gate, a loop over steps (``tests/naive/hierarchical.py``).

    Args:
        table_dim: width I of the table.
        context_dim: width D of the context, 0 for none.
        units: hidden units U.
        capped: hold the input gate at most at 1 - forget gate, which keeps the cell between -1 and 1
            (HAED, Appendix A).
    """

    def __init__(self, table_dim: int, context_dim: int, units: int, capped: bool = False) -> None:
        super().__init__()
        self.units = units
        self.table_dim = table_dim
        self.capped = capped
        # torch's own module owns the parameters: cuDNN wants them in its layout, and its padded call is the naive twin.
        self.cell = nn.LSTM(table_dim + context_dim, units, batch_first=True)
        self.packed: PackedWeight | None = None

    def forward(self, table_RI: Tensor, context_MD: Tensor | None, steps: Steps) -> Tensor:
        """Hidden states (F, U) of all steps, from a zero state; a table (R, I) and one context a sequence."""
        return self._run(table_RI, context_MD, steps)[0]

    def with_last_cells(self, table_RI: Tensor, context_MD: Tensor | None, steps: Steps) -> tuple[Tensor, Tensor]:
        """As ``forward``, with the cell states (M, U) behind the last step of each sequence, detached."""
        hidden_FU, cell_XU, last_M = self._run(table_RI, context_MD, steps)
        return hidden_FU, cell_XU.detach().index_select(0, last_M)

    def _run(self, table_RI: Tensor, context_MD: Tensor | None, steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, some cell states, and which of these are the last ones of the M sequences."""
        packing = Packing.of(torch.bincount(steps.sequence_P))
        place_P = packing.place(steps.sequence_P, steps.step_P)
        symbol_P = torch.empty_like(place_P).index_copy_(0, place_P, steps.symbol_P)
        slot_P = torch.empty_like(place_P).index_copy_(0, place_P, steps.slot_P)
        context_MD = None if context_MD is None else context_MD.index_select(0, packing.order_M)
        run = self._cudnn if table_RI.is_cuda and not self.capped else self._packed
        return run(table_RI, symbol_P, context_MD, packing, slot_P, steps.slots)

    def weights(self) -> list[Tensor]:
        """From the input (4U, I + D), from the hidden state (4U, U), and two biases (4U,): gates i, f, g, o."""
        return list(self.cell.all_weights[0])

    def project_table(self, table_RI: Tensor) -> Tensor:
        """What each row of the table adds to the gates, biases included: (R, I) to (R, 4U)."""
        weight, _, *biases = self.weights()
        return F.linear(table_RI, weight[:, : self.table_dim], biases[0] + biases[1])

    def project_context(self, context_MD: Tensor) -> Tensor:
        """What each context adds to the gates: (M, D) to (M, 4U)."""
        return F.linear(context_MD, self.weights()[0][:, self.table_dim :])

    def new_state(self, rows: int, like: Tensor) -> LSTMState:
        """The zero state of a number of rows, of the type and on the device of ``like``."""
        return LSTMState(like.new_zeros(rows, self.units), like.new_zeros(rows, self.units))

    def step(self, gates_B4U: Tensor, state: LSTMState) -> Tensor:
        """One step of every row from its projected input, (B, 4U) to the new hidden states (B, U)."""
        weight = self.weights()[1]
        recurrent = F.linear if self.packed is None else self.packed.linear
        gates_B4U = gates_B4U + recurrent(state.hidden_BU, weight)
        i, f, g, o = gates_B4U.chunk(4, dim=1)
        i, f = i.sigmoid(), f.sigmoid()
        if self.capped:
            i = torch.minimum(i, 1 - f)
        state.cell_BU = f * state.cell_BU + i * g.tanh()
        state.hidden_BU = o.sigmoid() * state.cell_BU.tanh()
        return state.hidden_BU

    def make_generation_fast_(self, **unused: object) -> None:
        """fairseq's hook, called once before evaluation and generation."""
        self.packed = pack(self.weights()[1])

    def _apply(self, fn, recurse: bool = True):
        self.packed = None
        return super()._apply(fn, recurse)

    def _packed(
        self,
        table_RI: Tensor,
        symbol_P: Tensor,
        context_MD: Tensor | None,
        packing: Packing,
        slot_P: Tensor,
        slots: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By hand: steps are packed, and contexts in the packing's order."""
        gates_R4U = self.project_table(table_RI)
        gates_M4U = None if context_MD is None else self.project_context(context_MD)
        weight = self.weights()[1]
        hidden_FU, cell_PU = _PackedLSTM.apply(
            gates_R4U.to(weight.dtype), gates_M4U, weight, symbol_P, slot_P, packing.batch_sizes, slots, self.capped
        )
        return hidden_FU, cell_PU, packing.last()

    def _cudnn(
        self,
        table_RI: Tensor,
        symbol_P: Tensor,
        context_MD: Tensor | None,
        packing: Packing,
        slot_P: Tensor,
        slots: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same through one fused call, for devices that have one."""
        x_PI = F.embedding(symbol_P, table_RI)
        if context_MD is not None:
            x_PI = torch.cat([x_PI, torch.cat([context_MD[:size] for size in packing.batch_sizes])], dim=1)
        packed, (_, cell_1MU) = self.cell(PackedSequence(x_PI, torch.tensor(packing.batch_sizes, device="cpu")))
        hidden_PU = packed.data
        hidden_FU = hidden_PU.new_zeros(slots, self.units).index_copy(0, slot_P, hidden_PU)
        return hidden_FU, cell_1MU[0], packing.rank_M


class _PackedLSTM(torch.autograd.Function):
    """The recurrence over step-major packed gates; keeps the activated gates and the cells, 5U numbers a step."""

    @staticmethod
    def forward(ctx, table, context, weight, symbol, slot, sizes, slots, capped):
        total, units = symbol.numel(), weight.shape[1]
        gates = table.index_select(0, symbol)
        cells = gates.new_empty(total, units)
        hidden = gates.new_zeros(slots, units)
        # Fresh blocks of this size cost more than what is written into them, so one is used by every step.
        h_MU = gates.new_empty(sizes[0], units)
        start, h, c = 0, None, None
        for size in sizes:
            rows = slice(start, start + size)
            z = gates[rows]
            if context is not None:
                z += context[:size]
            if h is not None:
                z.addmm_(h[:size], weight.t())
            i, f, g, o = z.chunk(4, dim=1)
            z[:, : 2 * units].sigmoid_()
            g.tanh_()
            o.sigmoid_()
            c_next = torch.mul(torch.minimum(i, 1 - f) if capped else i, g, out=cells[rows])
            if c is not None:
                c_next.addcmul_(f, c[:size])
            h = torch.tanh(c_next, out=h_MU[:size]).mul_(o)
            hidden.index_copy_(0, slot[rows], h)
            c, start = c_next, start + size
        ctx.sizes, ctx.capped, ctx.has_context = sizes, capped, context is not None
        ctx.table_rows = table.shape[0]
        ctx.save_for_backward(gates, cells, hidden, weight, symbol, slot)
        ctx.mark_non_differentiable(cells)
        return hidden, cells

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_hidden, _grad_cells):
        gates, cells, hidden, weight, symbol, slot = ctx.saved_tensors
        sizes, units = ctx.sizes, weight.shape[1]
        grad_gates = torch.empty_like(gates)
        grad_context = gates.new_zeros(sizes[0], 4 * units) if ctx.has_context else None
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        # The gradients of a step's states are read by the step before it, which writes its own to the other block.
        dh_even, dh_odd, dh_later, tanh_MU = gates.new_empty(4, sizes[0], units).unbind(0)
        grad_h = grad_c = None
        for step in reversed(range(len(sizes))):
            size = sizes[step]
            rows = slice(starts[step], starts[step + 1])
            i, f, g, o = gates[rows].chunk(4, dim=1)
            z = grad_gates[rows]
            di, df, dg, do = z.chunk(4, dim=1)
            tanh_c = torch.tanh(cells[rows], out=tanh_MU[:size])
            dh = torch.index_select(grad_hidden, 0, slot[rows], out=(dh_odd if step % 2 else dh_even)[:size])
            if grad_h is not None:
                dh[: grad_h.shape[0]] += grad_h
            _sigmoid_backward_(torch.mul(dh, tanh_c, out=do), o)
            dc = _tanh_backward_(dh.mul_(o), tanh_c)
            if grad_c is not None:
                dc[: grad_c.shape[0]] += grad_c
            torch.mul(dc, torch.minimum(i, 1 - f) if ctx.capped else i, out=dg)
            torch.mul(dc, g, out=di)
            if step > 0:
                torch.mul(dc, cells[starts[step - 1] : starts[step - 1] + size], out=df)
            else:
                df.zero_()
            if ctx.capped:
                capped = i > 1 - f
                df -= di * capped
                di.masked_fill_(capped, 0.0)
            _sigmoid_backward_(di, i)
            _sigmoid_backward_(df, f)
            _tanh_backward_(dg, g)
            if grad_context is not None:
                grad_context[:size] += z
            if step > 0:
                grad_h = torch.mm(z, weight, out=dh_later[:size])
                grad_c = dc.mul_(f)
        if len(sizes) > 1:
            previous = torch.cat([slot[starts[s - 1] : starts[s - 1] + sizes[s]] for s in range(1, len(sizes))])
            grad_weight = grad_gates[sizes[0] :].t() @ hidden.index_select(0, previous)
        else:
            grad_weight = torch.zeros_like(weight)
        grad_table = grad_gates.new_zeros(ctx.table_rows, 4 * units).index_add_(0, symbol, grad_gates)
        return grad_table, grad_context, grad_weight, None, None, None, None, None


def _sigmoid_backward_(grad: Tensor, output: Tensor) -> Tensor:
    """In place: the gradient of a sigmoid's input from that of its output."""
    return torch.ops.aten.sigmoid_backward.grad_input(grad, output, grad_input=grad)


def _tanh_backward_(grad: Tensor, output: Tensor) -> Tensor:
    """In place: the gradient of a tanh's input from that of its output."""
    return torch.ops.aten.tanh_backward.grad_input(grad, output, grad_input=grad)
