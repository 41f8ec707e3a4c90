"""Cached decoding of attention through windows: a cost that does not depend on how many tokens there were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fairseq_ms.decoding.blocks import UnfinishedBlock
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.kv_cache import Reorderable
from fairseq_ms.modules.multiscale.retina import RetinaAttention, RetinaLayer
from fairseq_ms.ops.attention import attend, merge_heads, split_heads
from fairseq_ms.ops.window_layout import HeadGroup, Layouts


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


class WindowCache:
    """What one layer remembers: the windows of every scale and each unfinished block, normalised."""

    def __init__(self, attention: RetinaAttention, batch_size: int, like: Tensor) -> None:
        self.attention = attention
        self.windows = [
            SlidingCache(batch_size, group.heads, attention.head_dim, -(-group.far // group.factor) + 1, like)
            for group in attention.groups
        ]
        self.unfinished = [UnfinishedBlock(batch_size, group.factor, like) for group in attention.groups[1:]]

    def attend_first(self, x_BTD: Tensor, layouts: Layouts) -> Tensor:
        """Take in the layer's inputs at the first T positions and attend from there: (B, T, D) -> (B, T, D)."""
        fine, coarse = self.attention.project(x_BTD)
        for group, window, pair in zip(self.attention.groups, self.windows, [fine[..., x_BTD.size(-1) :], *coarse]):
            window.append(*self._split(group, pair))
        if self.unfinished:
            normed = self.attention.norm(x_BTD)
            for block in self.unfinished:
                block.push(normed)
        return self.attention.attend(fine, coarse, layouts)

    def attend(self, x_B1D: Tensor, query: int) -> Tensor:
        """Take in the layer's input at one more position and attend from there: (B, 1, D) -> (B, 1, D)."""
        attention, dim = self.attention, x_B1D.size(-1)
        normed = attention.norm(x_B1D)
        fine = attention.fine(normed)
        self.windows[0].append(*self._split(attention.groups[0], fine[..., dim:]))
        for level, block in enumerate(self.unfinished):
            if block.push(normed):
                pair = attention.coarse[level](attention.pools[level](block.buffer))
                self.windows[level + 1].append(*self._split(attention.groups[level + 1], pair))
        heads = []
        queries = fine[..., :dim].split([group.heads * attention.head_dim for group in attention.groups], dim=-1)
        for group, window, q_B1D in zip(attention.groups, self.windows, queries):
            start, stop = max(0, group.first_visible(query)), group.last_visible(query) + 1
            if start >= stop:
                heads.append(torch.zeros_like(q_B1D))
            else:
                k, v = window.view(start, stop)
                heads.append(merge_heads(attend(split_heads(q_B1D, group.heads), k, v)))
        return attention.out(torch.cat(heads, dim=-1))

    def _split(self, group: HeadGroup, pair_BCD: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, 2 * N * H) -> keys and values, (B, N, C, H) each."""
        k, v = pair_BCD.unflatten(-1, (2, group.heads, self.attention.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return k, v

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        parts: list[Reorderable] = [*self.windows, *self.unfinished]
        for part in parts:
            part.reorder(order)


class RetinaState(DecodingState):
    """The windows of every layer; what has left them is forgotten.

    Args:
        embed, layers, norm: the model's
        batch_size: B
    """

    def __init__(
        self, embed: TokenEmbedding, layers: Sequence[RetinaLayer], norm: nn.LayerNorm, batch_size: int
    ) -> None:
        self.embed, self.layers, self.norm = embed, layers, norm
        self.length = 0
        self.caches = [WindowCache(layer.attention, batch_size, embed.like()) for layer in layers]

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        layouts = Layouts(self.caches[0].attention.groups, tokens_BT.size(1), tokens_BT.device)
        for layer, cache in zip(self.layers, self.caches):
            x_BTD = x_BTD + cache.attend_first(x_BTD, layouts)
            x_BTD = x_BTD + layer.ffn(x_BTD)
        self.length = tokens_BT.size(1)
        return self.norm(x_BTD)

    def step(self, tokens_B1: Tensor) -> Tensor:
        x_B1D = self.embed(tokens_B1, start=self.length)
        for layer, cache in zip(self.layers, self.caches):
            x_B1D = x_B1D + cache.attend(x_B1D, self.length)
            x_B1D = x_B1D + layer.ffn(x_B1D)
        self.length += 1
        return self.norm(x_B1D)

    def reorder(self, order: Tensor) -> None:
        for cache in self.caches:
            cache.reorder(order)
