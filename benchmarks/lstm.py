"""The LSTM of a chunk decoder against torch's own on a ``PackedSequence``: neither computes anything for padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from benchmarks.runner import Contestant, Options, Section, assert_parity
from fairseq_ms.analysis.saved_bytes import saved_bytes
from fairseq_ms.core.ops.lstm import LSTM, Steps

# Sums of about 10,000 terms of order 1 in float32.
GRADIENT_TOLERANCE = 2e-3
SYMBOLS, EMBED, CONTEXT, LONGEST, MEAN = 200, 10, 356, 12, 5.5


class LSTMOverChunks:
    """One LSTM over as many symbols, in chunks as long as words: their mean is 5.5, the longest have 12."""

    def __init__(self, units: int, symbols: int) -> None:
        torch.manual_seed(0)
        # Binomial lengths of the mean that is wanted, at least 1.
        chunks = int(symbols / MEAN)
        coins = torch.rand(chunks, LONGEST - 1) < (MEAN - 1) / (LONGEST - 1)
        lengths_M = 1 + coins.sum(dim=1)
        total = int(lengths_M.sum())
        sequence_P = torch.repeat_interleave(torch.arange(chunks), lengths_M)
        step_P = torch.cat([torch.arange(int(length)) for length in lengths_M])
        self.steps = Steps(torch.randint(SYMBOLS, (total,)), sequence_P, step_P, torch.arange(total), total)
        self.table = torch.randn(SYMBOLS, EMBED, requires_grad=True)
        self.context = torch.randn(chunks, CONTEXT, requires_grad=True)
        self.lstm = LSTM(EMBED, CONTEXT, units)
        self.weight = torch.randn(total, units)
        # Sorted by length before the clock starts, for torch's.
        self.order_P = torch.empty_like(step_P).index_copy_(0, self.steps.step_major(), torch.arange(total))
        self.symbol_P, self.chunk_P = self.steps.symbol_P[self.order_P], sequence_P[self.order_P]
        self.batch_sizes = torch.tensor(self.steps.batch_sizes)
        self.title = f"LSTM of {units} units over {total} symbols in {chunks} chunks"

    def ours(self) -> Tensor:
        return self.lstm(self.table, self.context, self.steps)

    def torchs(self) -> Tensor:
        """The same hidden states: step 0 of all chunks, then step 1 of those that have one."""
        inputs_PI = torch.cat([F.embedding(self.symbol_P, self.table), self.context[self.chunk_P]], dim=1)
        return self.lstm.cell(PackedSequence(inputs_PI, self.batch_sizes))[0].data

    def gradients(self, forward: Callable[[], Tensor], weight: Tensor) -> list[Tensor]:
        """Forward and backward."""
        wanted = [self.table, self.context, *self.lstm.parameters()]
        return list(torch.autograd.grad((forward() * weight).sum(), wanted))

    def step(self, forward: Callable[[], Tensor]) -> None:
        self.gradients(forward, self.weight)

    def bytes_kept(self, forward: Callable[[], Tensor]) -> float:
        return float(saved_bytes(forward, self.lstm))

    def parity(self) -> str:
        theirs = self.gradients(self.torchs, self.weight[self.order_P])
        both = zip(self.gradients(self.ours, self.weight), theirs, strict=True)
        worst = max(assert_parity("gradient", one, other, GRADIENT_TOLERANCE) for one, other in both)
        return f"both give the same gradients, within {worst:.1e}"


def sections(options: Options) -> Iterable[Section]:
    """Time and bytes of forward and backward, at the sizes of the paper's decoders."""
    for units, symbols in [(16, 100)] if options.quick else [(1024, 1472 * 8), (2000, 1472 * 4)]:
        lstm = LSTMOverChunks(units, symbols)
        name = "nn.LSTM, PackedSequence"
        yield Section(
            f"{lstm.title}, forward and backward",
            "s",
            [
                Contestant(name, partial(lstm.step, lstm.torchs)),
                Contestant("ops.lstm", partial(lstm.step, lstm.ours), 0.9),
            ],
            name,
            lstm.parity,
        )
        yield Section(
            f"{lstm.title}, bytes kept for backward",
            "MB",
            [
                Contestant(name, partial(lstm.bytes_kept, lstm.torchs)),
                Contestant("ops.lstm", partial(lstm.bytes_kept, lstm.ours)),
            ],
            name,
            lstm.parity,
            measure="value",
            scale=1e-6,
        )
