"""Attention over rows that have seen different numbers of positions, since chunks end when their tokens say so."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_ms.modules.attention import SelfAttentionOfProjection, attend, merge_heads
from fairseq_ms.modules.transformer import LayerConfig, TransformerStack
from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.norm import norm_linear
from fairseq_ms.ops.recompute import pointwise_linear


class RowCaches:
    """Keys and values of every layer of a stack, and how many positions each row has of them.

    Args:
        layers, rows, heads, head_dim: the sizes.
        capacity: positions to allocate; the buffers double when a row is full.
        like: a tensor of the wanted type and device.
    """

    def __init__(self, layers: int, rows: int, heads: int, head_dim: int, capacity: int, like: Tensor) -> None:
        shape = (2, rows, heads, max(capacity, 1), head_dim)
        self.buffers = [like.new_zeros(shape) for _ in range(layers)]
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=like.device)

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        self.buffers = [buffer.index_select(1, order) for buffer in self.buffers]
        self.lengths_B = self.lengths_B.index_select(0, order)

    def reserve(self, positions: int) -> None:
        """Make room for at least this many positions."""
        two, rows, heads, capacity, head_dim = self.buffers[0].shape
        if positions > capacity:
            grown = [b.new_zeros(two, rows, heads, max(positions, 2 * capacity), head_dim) for b in self.buffers]
            for new, old in zip(grown, self.buffers, strict=True):
                new[:, :, :, :capacity] = old
            self.buffers = grown

    def fill(self) -> list[_Fill]:
        """What each layer is to be given to run over the positions from 0 on of all rows at once."""
        return [_Fill(buffer) for buffer in self.buffers]

    def one_more(self, rows_R: Tensor | None) -> tuple[list[_OneMore], Tensor]:
        """What each layer is to be given for one more position of some rows (or all), and their attention bias.

        The bias is (R, 1, 1, S): a row sees its own positions, the new one included, and not what is left in the
        buffer behind them.
        """
        lengths_R = self.lengths_B if rows_R is None else self.lengths_B[rows_R]
        longest = int(lengths_R.max()) + 1
        self.reserve(longest)
        hidden_RS = torch.arange(longest, device=lengths_R.device) > lengths_R.unsqueeze(1)
        bias_RS = self.buffers[0].new_zeros(hidden_RS.shape).masked_fill_(hidden_RS, -torch.inf)
        if rows_R is None:
            self.lengths_B = lengths_R + 1
        else:
            self.lengths_B[rows_R] = lengths_R + 1
        return [_OneMore(buffer, rows_R, lengths_R, longest) for buffer in self.buffers], bias_RS[:, None, None, :]


class _Fill:
    """One layer's cache while the positions from 0 on of all rows are computed at once."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def append(self, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        self.buffer[0, :, :, : k_BNTH.shape[2]] = k_BNTH
        self.buffer[1, :, :, : v_BNTH.shape[2]] = v_BNTH
        return k_BNTH, v_BNTH


class _OneMore:
    """One layer's cache while one position of some rows is computed, each at its own place."""

    def __init__(self, buffer: Tensor, rows_R: Tensor | None, lengths_R: Tensor, longest: int) -> None:
        self.buffer, self.rows_R, self.lengths_R, self.longest = buffer, rows_R, lengths_R, longest

    def append(self, k_RN1H: Tensor, v_RN1H: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rows_R
        every = torch.arange(self.lengths_R.numel(), device=self.lengths_R.device) if rows is None else rows
        self.buffer[0, every, :, self.lengths_R] = k_RN1H[:, :, 0]
        self.buffer[1, every, :, self.lengths_R] = v_RN1H[:, :, 0]
        seen = self.buffer[:, :, :, : self.longest]
        seen = seen if rows is None else seen.index_select(1, rows)
        return seen[0], seen[1]


class HeadAttention(nn.Module):
    """Causal self-attention whose heads' width is chosen freely: the paper's are 8 of 32 in a width of 356.

    Args:
        dim: model dimension D.
        heads, head_dim: N heads of H.
        dropout: probability of dropping an attention weight.
        recompute: as in ``attention.SelfAttention``.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, dropout: float, recompute: bool) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.dropout = dropout
        self.recompute = recompute
        self.qkv = Linear(dim, 3 * heads * head_dim)
        self.out = Linear(heads * head_dim, dim)

    def forward(
        self,
        x_BTD: Tensor,
        norm: nn.LayerNorm | None = None,
        mask: Tensor | list[tuple[int, int]] | None = None,
        cache: _Fill | _OneMore | None = None,
    ) -> Tensor:
        """Attend from every position to itself and those before it.

        ``mask`` is None for rows of equal length; an additive bias (B, 1, 1, S) for one position a row against a
        cache; or the rectangles of a sequence-major packing, for x (P, D) of sequences that do not see each other.
        """
        qkv = norm_linear(x_BTD, norm, self.qkv, self.recompute)
        if isinstance(mask, list):
            parts = qkv.split([count * length for count, length in mask])
            shapes = [(count, length, -1) for count, length in mask]
            done = [self._attend(p.view(s), None, None).flatten(0, 1) for p, s in zip(parts, shapes, strict=True)]
            return self.out(done[0] if len(done) == 1 else torch.cat(done))  # type: ignore[no-any-return]
        if mask is None and cache is None and self.recompute and qkv.device.type == "cpu" and torch.is_grad_enabled():
            attention = SelfAttentionOfProjection(self.heads, self.dropout if self.training else 0.0)
            return pointwise_linear(attention, self.out.weight, self.out.bias, qkv)
        return self.out(self._attend(qkv, mask, cache))  # type: ignore[no-any-return]

    def _attend(self, qkv: Tensor, bias: Tensor | None, cache: _Fill | _OneMore | None) -> Tensor:
        # (B, T, 3 * N * H) -> 3 of (B, N, T, H)
        q, k, v = qkv.unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            k, v = cache.append(k, v)
        dropout = self.dropout if self.training else 0.0
        y_BNTH = attend(q, k, v, bias=bias, causal=bias is None, dropout=dropout, recompute=self.recompute)
        return merge_heads(y_BNTH)


def head_stack(config: LayerConfig, layers: int, head_dim: int) -> TransformerStack:
    """Transformer layers with ``HeadAttention``."""

    def attention() -> HeadAttention:
        return HeadAttention(config.dim, config.heads, head_dim, config.attention_dropout, config.recompute)

    return TransformerStack(config, layers, attention)
