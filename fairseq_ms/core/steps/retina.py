"""The state of a retina in buffers of fixed shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, cycle, groupby
from typing import Any

import torch
from torch import Tensor

from fairseq_ms.core.cache import KeyValueCache
from fairseq_ms.core.layers import QueryKey
from fairseq_ms.core.ops.attention import merge_heads, visible
from fairseq_ms.core.ops.rotary import rotate
from fairseq_ms.core.retina import Retina, RetinaConfig, RetinaState, WindowCache
from fairseq_ms.core.scales import Scale
from fairseq_ms.core.steps.buffers import FixedCache, FixedRows, FixedState, Slots, aligned, first_position, state_of

# Windows of at most this many places share one attention call.
_FEW = 128


class WindowSlots:
    """The places of all windows of a retina's layer in one buffer, to which a step writes once.

    Neighbouring windows of at most 128 places form a group: they have as many places as the widest of them and share
    an attention call, since launching a kernel takes longer than reading a few more keys.

    Attributes:
        windows: for every window, its number of key heads and the slots of its group
        groups: for every group, its number of key heads and its slots
        index_K: the place in the buffer that each key head writes to; set by ``begin``
        index_X: the place that each coarse factor writes to, in one buffer of all unfinished blocks; set by ``begin``
        rotation_2XF: rotary rotation of all queries, keys and values, X = N + 2 * K heads, or None; set by ``begin``
    """

    def __init__(
        self, position_1: Tensor, scales: Sequence[Scale], capacity: int, like: Tensor, config: RetinaConfig
    ) -> None:
        self.heads, shared = config.heads, config.heads // config.key_heads
        wanted = {scale: aligned(scale.most_blocks(capacity) + 1) for scale in scales}
        few = max((size for size in wanted.values() if size <= _FEW), default=0)
        self.windows: list[tuple[int, Slots]] = []
        self.groups: list[tuple[int, Slots]] = []
        for size, group in groupby(scales, lambda scale: max(few, wanted[scale])):
            own = list(group)
            bounds = position_1.new_tensor([scale.bounds for scale in own for _ in range(scale.heads // shared)])
            factor_K1, nearest_K1, end_K1 = bounds.split(1, dim=1)
            seen = partial(visible, factor=factor_K1, nearest=nearest_K1, end=end_K1)
            slots = Slots(position_1, size - 1, like, factor_K1, seen)
            self.groups.append((len(bounds), slots))
            self.windows += [(scale.heads // shared, slots) for scale in own]
        self.factors = list(dict.fromkeys(scale.factor for scale in scales if scale.factor > 1))
        # A key is rotated by the first position of its block, a value by position 0.
        factors = [scale.factor for scale in scales for _ in range(scale.heads // shared)]
        self.factors_X = position_1.new_tensor([*config.heads * [1], *factors, *len(factors) * [2**62]])
        self.rotation = partial(config.rotation, like=like)
        self.position_1, self.coarse_X = position_1, position_1.new_tensor(self.factors)
        sizes = [slots.size for heads, slots in self.groups for _ in range(heads)]
        self.first_K, self.first_X = (position_1.new_tensor([0, *accumulate(x)][:-1]) for x in (sizes, self.factors))

    def begin(self, phase: int) -> None:
        """Compute places, masks and rotations for the next step."""
        for _, slots in self.groups:
            slots.begin(phase)
        self.index_K = self.first_K + torch.cat([slots.index_1 for _, slots in self.groups]).squeeze(1)
        self.index_X = self.first_X + self.position_1 % self.coarse_X
        self.rotation_2XF = self.rotation(self.position_1 // self.factors_X * self.factors_X)


class FixedWindows(WindowCache):
    """The KV caches of a retina's layer in one buffer, and its unfinished blocks in another; sizes are ``cache``'s."""

    def __init__(self, cache: WindowCache, slots: WindowSlots, like: Tensor) -> None:
        _, batch_size, _, _, head_dim = cache.windows[0].buffer.shape
        places = sum(heads * own.size for heads, own in slots.groups)
        self.slots, self.buffer = slots, like.new_zeros(2, batch_size, places, head_dim)
        self.blocks = like.new_zeros(batch_size, sum(slots.factors), like.size(-1))
        # Views: by group for attention, by window for loading.
        self.groups = self._views(cache.windows, slots.groups)
        windows = self._views(cache.windows, slots.windows)
        unfinished: Any = [FixedRows(x) for x in self.blocks.split(slots.factors, dim=1)]
        super().__init__(windows, unfinished)

    def _views(self, caches: Iterable[KeyValueCache], parts: Sequence[tuple[int, Slots]]) -> list[FixedCache]:
        views = self.buffer.split([heads * slots.size for heads, slots in parts], dim=2)
        shaped = [x.unflatten(2, (heads, slots.size)) for x, (heads, slots) in zip(views, parts)]
        return [FixedCache(cache, slots, x) for cache, (_, slots), x in zip(caches, parts, shaped)]

    def join(self, x_B1D: Tensor) -> list[Tensor]:
        """Write one more position into the unfinished block of every coarse factor; returns these, (B, k, D) each.

        They are projected at every step: the key of an unfinished block is masked, and overwritten by the next step.
        """
        if self.unfinished:
            self.blocks.index_copy_(1, self.slots.index_X, x_B1D.expand(-1, len(self.unfinished), -1))
        return [block.x for block in self.unfinished]

    def attend(self, qk: QueryKey, fine: Tensor, coarse: Sequence[Tensor]) -> Tensor:
        """Attention of one position through all windows, (B, 1, N * H), from what ``RetinaAttention.project`` gives."""
        heads, key_heads = self.slots.heads, len(self.slots.first_K)
        counts = [heads // key_heads * count for count, _ in self.slots.groups]
        width = heads * qk.head_dim
        keys, values = zip(*(pair.chunk(2, dim=-1) for pair in (fine[..., width:], *coarse)))
        qkv = qk(torch.cat([fine[..., :width], *keys, *values], dim=-1), heads, key_heads)
        # Rotated as N + 2 * K positions of one head: (B, 1, (N + 2 * K) * H) -> (B, N + 2 * K, H)
        turned = rotate(qkv.view(-1, heads + 2 * key_heads, qk.head_dim), self.slots.rotation_2XF, 1)
        written = turned[:, heads:].unflatten(1, (2, key_heads)).transpose(0, 1)
        self.buffer.index_copy_(2, self.slots.index_K, written)
        queries = turned[:, :heads].unsqueeze(2).split(counts, dim=1)
        sinks = qk.sinks.split(counts) if qk.sinks is not None else [None] * len(counts)
        seen = [group.read(q, own) for group, q, own in zip(self.groups, queries, sinks)]
        return merge_heads(torch.cat(seen, dim=1) if len(seen) > 1 else seen[0])


@state_of(Retina)
class FixedRetina(FixedState, RetinaState):
    """The windows of every layer; layers with the same windows share their places."""

    def __init__(self, model: Retina, batch_size: int, capacity: int) -> None:
        like, growing = model.embed.like(), model.new_state(batch_size)
        self.position_1 = first_position(like)
        self.places = [WindowSlots(self.position_1, turn, capacity, like, model.config) for turn in model.turns]
        caches: list[WindowCache] = [
            FixedWindows(cache, slots, like) for cache, slots in zip(growing.caches, cycle(self.places))
        ]
        super().__init__(model.config, batch_size, caches)

    def rotations(self, model: Retina, x_BTD: Tensor) -> None:
        """None, since ``FixedWindows.attend`` rotates queries and keys."""
