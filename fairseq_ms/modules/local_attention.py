"""Self-attention whose heads look at several scales through windows, and what it remembers in generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fairseq_ms.modules.attention import attend, merge_heads, split_heads
from fairseq_ms.modules.linear import Linear
from fairseq_ms.modules.norm import norm_linear, norm_linear_and_normed
from fairseq_ms.modules.pooling import Downsample
from fairseq_ms.modules.recompute import pointwise_linear
from fairseq_ms.modules.window_attention import WindowAttention
from fairseq_ms.modules.window_layout import HeadGroup, Layouts


class SlidingCache:
    """The last ``keep`` positions of keys and values, (B, N, position, H), addressed by absolute position.

    The buffer has room for twice as many; when it is full, what is still needed moves to its front, so a
    step costs the same at any position.
    """

    def __init__(self, batch_size: int, heads: int, head_dim: int, keep: int, like: Tensor) -> None:
        self.keep = keep
        self.buffer = torch.empty(2, batch_size, heads, 2 * keep, head_dim, dtype=like.dtype, device=like.device)
        self.first = 0
        self.end = 0

    def append(self, k_BNCH: Tensor, v_BNCH: Tensor) -> None:
        """Add C positions; only the last ``keep`` of them are kept if there are more."""
        count = k_BNCH.size(2)
        skipped = max(0, count - self.keep)
        used = self.end - self.first
        if used + count > self.buffer.size(3):
            kept = min(self.keep, used)
            if not skipped:
                self.buffer[:, :, :, :kept] = self.buffer[:, :, :, used - kept : used].clone()
            self.first = self.end - kept
            used = kept
        if skipped:
            self.first, used = self.end + skipped, 0
        self.buffer[0, :, :, used : used + count - skipped] = k_BNCH[:, :, skipped:]
        self.buffer[1, :, :, used : used + count - skipped] = v_BNCH[:, :, skipped:]
        self.end += count

    def view(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions start .. stop - 1."""
        assert self.first <= start <= stop <= self.end
        window = self.buffer[:, :, :, start - self.first : stop - self.first]
        return window[0], window[1]

    def reorder(self, order: Tensor) -> None:
        self.buffer = self.buffer.index_select(1, order)


class LocalCache:
    """What one layer of local attention remembers: the windows of every scale and each unfinished block."""

    def __init__(self, attention: LocalAttention, batch_size: int, like: Tensor) -> None:
        self.length = 0
        self.windows = [
            SlidingCache(batch_size, group.heads, attention.head_dim, -(-group.far // group.factor) + 1, like)
            for group in attention.groups
        ]
        dim = attention.out.in_features
        self.unfinished = [
            torch.empty(batch_size, group.factor, dim, dtype=like.dtype, device=like.device)
            for group in attention.groups[1:]
        ]

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        for window in self.windows:
            window.reorder(order)
        self.unfinished = [block.index_select(0, order) for block in self.unfinished]


class LocalAttention(nn.Module):
    """Multi-head attention whose heads look at several scales of the layer's input, each through its window.

    Queries come from every position. Keys and values of a coarse scale are projected from the input (after
    the layer norm, if there is one) pooled at that scale. With the single scale 1x it is plain local
    attention (Section 3.4, Listing 3, Table 4).

    Args:
        dim: model dimension D, a multiple of the number of heads
        groups: the heads by scale, 1x first
        downsampler: "avg", "max" or "conv"
        dropout: probability of dropping an attention weight
        recompute: keep less for backward
    """

    def __init__(
        self,
        dim: int,
        groups: Sequence[HeadGroup],
        downsampler: str = "avg",
        dropout: float = 0.0,
        recompute: bool = True,
    ) -> None:
        super().__init__()
        assert groups[0].factor == 1
        assert dim % sum(group.heads for group in groups) == 0
        self.groups = list(groups)
        self.head_dim = dim // sum(group.heads for group in groups)
        self.dropout = dropout
        self.recompute = recompute
        self.fine = Linear(dim, dim + 2 * groups[0].heads * self.head_dim)
        self.pools = nn.ModuleList(Downsample(downsampler, dim, group.factor) for group in groups[1:])
        self.coarse = nn.ModuleList(Linear(dim, 2 * group.heads * self.head_dim) for group in groups[1:])
        self.out = Linear(dim, dim)

    def new_cache(self, batch_size: int, capacity: int, like: Tensor) -> LocalCache:
        """An empty cache; its size depends on the windows alone, not on ``capacity``."""
        return LocalCache(self, batch_size, like)

    def forward(
        self,
        x_BTD: Tensor,
        norm: nn.LayerNorm | None = None,
        mask: Layouts | None = None,
        cache: LocalCache | None = None,
    ) -> Tensor:
        """Attend over a whole sequence, or with a cache that has begun, at its next position.

        x (B, T, D) -> (B, T, D). ``mask`` holds the layouts of T tokens; a fresh cache is filled.
        """
        if cache is not None and cache.length > 0:
            return self._step(x_BTD, norm, cache)
        assert mask is not None
        fine, coarse, normed = self._project(x_BTD, norm)
        if cache is not None:
            self._fill(cache, [fine[..., x_BTD.size(-1) :], *coarse], normed)
        dropout = self.dropout if self.training else 0.0
        attention = WindowAttention(self.groups, mask.groups, self.head_dim, dropout)
        if self.recompute and fine.device.type == "cpu":
            if torch.is_grad_enabled():
                return pointwise_linear(attention, self.out.weight, self.out.bias, fine, *coarse)
            return self.out(attention(fine, *coarse))
        return self.out(attention.by_autograd(fine, *coarse))

    def keys_and_values(self, x_BTD: Tensor, norm: nn.LayerNorm | None) -> list[Tensor]:
        """What the heads of each scale look at, finest first: keys beside values, (B, T // k, 2 * N * H)."""
        fine, coarse, _ = self._project(x_BTD, norm)
        return [fine[..., x_BTD.size(-1) :], *coarse]

    def _project(self, x_BTD: Tensor, norm: nn.LayerNorm | None) -> tuple[Tensor, list[Tensor], Tensor]:
        """Queries with keys and values at 1x, keys and values of the other scales, and their input, normalised."""
        if not self.coarse:
            return norm_linear(x_BTD, norm, self.fine, self.recompute), [], x_BTD
        fine, normed = norm_linear_and_normed(x_BTD, norm, self.fine, self.recompute)
        coarse = []
        for group, pool, project in zip(self.groups[1:], self.pools, self.coarse):
            whole = x_BTD.size(1) - x_BTD.size(1) % group.factor
            coarse.append(project(pool(normed[:, :whole])))
        return fine, coarse, normed

    def _step(self, x_B1D: Tensor, norm: nn.LayerNorm | None, cache: LocalCache) -> Tensor:
        """One more position of every row, at a cost that does not depend on how many there were."""
        normed = norm(x_B1D) if norm is not None else x_B1D
        query = cache.length
        q, fine = self.fine(normed).split([x_B1D.size(-1), self.fine.out_features - x_B1D.size(-1)], dim=-1)
        cache.windows[0].append(*self._keys_and_values(self.groups[0], fine))
        for number, group in enumerate(self.groups[1:]):
            block = cache.unfinished[number]
            block[:, query % group.factor] = normed[:, 0]
            if (query + 1) % group.factor == 0:
                pair = self.coarse[number](self.pools[number](block))
                cache.windows[number + 1].append(*self._keys_and_values(group, pair))
        cache.length += 1
        heads = []
        queries = q.split([group.heads * self.head_dim for group in self.groups], dim=-1)
        for group, window, q_group in zip(self.groups, cache.windows, queries):
            start, stop = max(0, group.first_visible(query)), group.last_visible(query) + 1
            if start >= stop:
                heads.append(torch.zeros_like(q_group))
            else:
                k, v = window.view(start, stop)
                heads.append(merge_heads(attend(split_heads(q_group, group.heads), k, v)))
        return self.out(torch.cat(heads, dim=-1))

    def _keys_and_values(self, group: HeadGroup, pair_BCD: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, 2 * N * H) -> keys and values, (B, N, C, H) each."""
        k, v = pair_BCD.unflatten(-1, (2, group.heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return k, v

    def _fill(self, cache: LocalCache, pairs: Sequence[Tensor], normed_BTD: Tensor) -> None:
        length = normed_BTD.size(1)
        for group, window, pair in zip(self.groups, cache.windows, pairs):
            window.append(*self._keys_and_values(group, pair))
        for block in cache.unfinished:
            rest = length % block.size(1)
            if rest:
                block[:, :rest] = normed_BTD[:, length - rest :]
        cache.length = length
