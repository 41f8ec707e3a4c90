"""The retina: some heads see near tokens one by one, others see far tokens in blocks.

Multi-scale Transformer LMs, Section 3.4, Listing 3, Table 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor, nn

from fairseq_ms.core.cache import KeyValueCache, State
from fairseq_ms.core.config import ModelConfig
from fairseq_ms.core.layers import QueryKey, ResidualLayer, TypedList
from fairseq_ms.core.model import LanguageModel
from fairseq_ms.core.ops.linear import norm_linear, projection
from fairseq_ms.core.ops.recompute import keep_in_graph
from fairseq_ms.core.ops.window_attention import attend_window
from fairseq_ms.core.pooling import Downsample, UnfinishedBlock
from fairseq_ms.core.scales import Scale, window_turns

# A text is continued by so many tokens at a time, since their biases for all keys of a window are in memory at once.
# Its first piece is read as in training.
_AT_A_TIME = 256


@dataclass(frozen=True, kw_only=True)
class RetinaConfig(ModelConfig):
    """Sizes of a ``Retina``.

    Attributes:
        layers: number of layers
        scales: windows in tokens, finest scale first, several of which may share a factor, or a tuple of such tuples
            that the layers take in turns; heads are shared evenly unless every window names its own
        downsampler: "avg", "max" or "conv"
    """

    layers: int = 12
    scales: tuple[Scale, ...] | tuple[tuple[Scale, ...], ...] = (
        Scale(1, near=0, far=8),
        Scale(4, near=8, far=256),
        Scale(16, near=256, far=512),
    )
    downsampler: str = "avg"

    def __post_init__(self) -> None:
        super().__post_init__()
        group = self.heads // self.key_heads
        for scale in (scale for turn in self.turns for scale in turn):
            if scale.heads % group:
                rule = f"Scale.heads must be a multiple of {group}, the heads that share keys, with kv_heads"
                raise ValueError(f"{rule} {self.kv_heads}: got {scale.heads} for {scale.window}")

    @property
    def turns(self) -> list[list[Scale]]:
        """The windows of the first layers, with heads, until they repeat: layer i has ``turns[i % len(turns)]``."""
        return window_turns(self.scales, self.heads, self.layers)


class RetinaAttention(nn.Module):
    """Multi-head attention whose heads see several scales of the layer's input, each through its window.

    There are queries for every position. Keys and values of a coarse scale are projected from the normalised input,
    pooled at that scale. With 1x alone this is local attention. ``scales`` are the windows with their heads, 1x first.
    """

    def __init__(self, config: RetinaConfig, scales: Sequence[Scale]) -> None:
        super().__init__()
        dim, heads = config.dim, config.heads
        self.config, self.scales = config, list(scales)
        self.head_dim, group = config.width_of_head, heads // config.key_heads
        self.dropout = config.attention_dropout
        self.recompute = config.recompute
        self.norm, self.short_conv = config.norm_before(), config.short_convolution()
        # Key/value heads by window and by factor; windows of one factor share their projection.
        self.key_heads = [scale.heads // group for scale in scales]
        self.key_heads_of = dict.fromkeys((scale.factor for scale in scales), 0)
        for scale, count in zip(scales, self.key_heads):
            self.key_heads_of[scale.factor] += count
        finest, *widths = [count * self.head_dim for count in self.key_heads_of.values()]
        inner = heads * self.head_dim
        rows = (inner, finest, finest)
        self.fine = projection(dim, sum(rows), config.bias, rows)
        self.pools = TypedList(Downsample(config.downsampler, dim, factor) for factor in list(self.key_heads_of)[1:])
        self.coarse = TypedList(projection(dim, 2 * width, config.bias, rows=2 * (width,)) for width in widths)
        self.qk = QueryKey(config, self.head_dim, heads)
        self.out = projection(inner, dim, config.bias)

    def forward(
        self, x_BTD: Tensor, past: WindowCache | None = None, rotations: Mapping[int, Tensor | None] | None = None
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D).

        Attends to x and, with ``past``, to what is before it, and appends x's keys and values to ``past``.
        ``rotations[k]`` rotates the keys of scale k, those of the blocks that the T tokens complete; ``rotations[1]``
        rotates queries, too.
        """
        fine, coarse = self.project(x_BTD, past)
        if past is not None and past.attend is not None:
            return self.out(past.attend(self.qk, fine, coarse))
        dropout, seen = self.dropout if self.training else 0.0, []
        start = past.windows[0].length if past is not None else 0
        for place, (q, pair, sinks_N) in enumerate(self.by_window(*self.norm_and_rotate(fine, coarse, rotations))):
            oldest = 0
            if past is not None:
                known = past.windows[place].append(pair)
                # The first piece sees its own keys, not the cache's, whose type may be another (autocast).
                if start:
                    pair, oldest = known, past.windows[place].length - known.size(3)
            k, v = pair.unbind(0)
            seen.append(attend_window(self.scales[place], q, k, v, dropout, self.recompute, sinks_N, start, oldest))
        return self.out(torch.cat(seen, dim=2).flatten(2))

    def project(self, x_BTD: Tensor, past: WindowCache | None = None) -> tuple[Tensor, list[Tensor]]:
        """Project queries, and keys and values of every scale.

        Queries of all heads lie beside keys and values at 1x, (B, T, N * H + 2 * K * H). The other scales have keys
        beside values, (B, C, 2 * K * H), of the C blocks that are complete; K are the key/value heads of one scale.
        """
        # The first window's cache also has the last inputs of the short convolution.
        before = past.windows[0] if past is not None else None
        fine, normed = norm_linear(x_BTD, self.norm, self.fine, self.recompute, self.short_conv, before)
        coarse, inputs = [], [normed] * len(self.pools) if past is None else past.join(normed)
        for joined, pool, project in zip(inputs, self.pools, self.coarse):
            whole = joined.size(1) - joined.size(1) % pool.factor
            if not whole:
                # No block is complete. Compilers do not expect empty tensors, so nothing is computed, but
                # distributed training needs a gradient for every parameter.
                fine = keep_in_graph(fine, [*pool.parameters(), *project.parameters()] if self.training else [])
                coarse.append(fine.new_empty(fine.size(0), 0, 2 * self.key_heads_of[pool.factor] * self.head_dim))
            else:
                coarse.append(project(pool(joined[:, :whole])))
        return fine, coarse

    def norm_and_rotate(
        self, fine: Tensor, coarse: Sequence[Tensor], rotations: Mapping[int, Tensor | None] | None
    ) -> list[Tensor]:
        """Apply query/key norms and rotary positions to the output of ``project``."""
        found = []
        for (factor, keys), x in zip(self.key_heads_of.items(), [fine, *coarse]):
            # Queries lie in front of the keys at 1x alone.
            queries = self.config.heads if factor == 1 else 0
            rotation = rotations.get(factor) if rotations else None
            found.append(self.qk(x, queries, keys, rotation) if x.size(1) else x)
        return found

    def by_window(self, fine: Tensor, *coarse: Tensor) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """By window, queries (B, N, T, H), keys and values (2, B, K, C, H), and sinks (N,) or None."""
        counts, inner = [scale.heads for scale in self.scales], self.config.heads * self.head_dim
        keys: list[Tensor] = []
        for factor, pair in zip(self.key_heads_of, [fine[..., inner:], *coarse]):
            # (B, C, 2 * K * H) -> by window of the factor, (2, B, K, C, H)
            both = pair.unflatten(-1, (2, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
            keys += both.split([n for n, scale in zip(self.key_heads, self.scales) if scale.factor == factor], dim=2)
        queries = fine[..., :inner].unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(counts, dim=1)
        sinks = self.qk.sinks.split(counts) if self.qk.sinks is not None else [None] * len(counts)
        return list(zip(queries, keys, sinks))

    def new_cache(self, batch_size: int, capacity: int, like: Tensor) -> WindowCache:
        """An empty cache for texts of ``capacity`` tokens, of the type and on the device of ``like``."""
        windows: list[KeyValueCache] = []
        for scale, heads in zip(self.scales, self.key_heads):
            kind = KeyValueCache if scale.far is None else SlidingCache
            windows.append(kind(batch_size, heads, self.head_dim, scale.most_blocks(capacity), like))
        windows[0].before = self.config.last_inputs(batch_size, like)
        unfinished = [UnfinishedBlock(batch_size, pool.factor, like) for pool in self.pools]
        return WindowCache(windows, unfinished)


class SlidingCache(KeyValueCache):
    """A KV cache of at least the last ``keep`` positions.

    The buffer has room for twice as many; when it is full, the last ones move to its front, of which position ``first``
    is then the foremost.
    """

    def __init__(self, batch_size: int, heads: int, head_dim: int, keep: int, like: Tensor) -> None:
        super().__init__(batch_size, heads, head_dim, 2 * keep, like)
        self.keep = keep
        self.first = 0

    def append(self, pair_2BKCH: Tensor) -> Tensor:
        """Append keys and values of C positions; returns those kept so far and the new ones.

        Some may be older than any query sees: ``attend_window`` leaves them out.
        """
        used, count = self.length - self.first, pair_2BKCH.size(3)
        oldest = max(0, used - self.keep)
        if used + count <= self.buffer.size(3):
            self.buffer[:, :, :, used : used + count] = pair_2BKCH
            known = self.buffer[:, :, :, oldest : used + count]
        else:
            known = torch.cat([self.buffer[:, :, :, oldest:used], pair_2BKCH], dim=3)
            kept = known[:, :, :, -self.keep :]
            self.buffer[:, :, :, : kept.size(3)] = kept
            self.first = self.length + count - kept.size(3)
        self.length += count
        return known

    def kept(self) -> tuple[Tensor, int]:
        return self.buffer[:, :, :, : self.length - self.first], self.length

    def oldest_length(self) -> int:
        return max(super().oldest_length(), self.first + self.keep if self.first else 0)


class WindowCache:
    """The KV caches of a layer's windows, and its unfinished blocks.

    Args:
        windows: for each window, the KV cache of what it can see
        unfinished: for each coarse factor, the normalised inputs that wait to be pooled

    Attributes:
        attend: in a state of fixed shapes (``core/steps``), attends from one more position through all windows at once,
            given ``RetinaAttention.qk`` and the results of ``project``
    """

    attend: Callable[[QueryKey, Tensor, Sequence[Tensor]], Tensor] | None = None

    def __init__(self, windows: Sequence[KeyValueCache], unfinished: Sequence[UnfinishedBlock]) -> None:
        self.windows, self.unfinished = windows, unfinished

    def parts(self) -> list[KeyValueCache | UnfinishedBlock]:
        """All of them."""
        return [*self.windows, *self.unfinished]

    def join(self, x_BTD: Tensor) -> list[Tensor]:
        """For each coarse factor, the r positions of its unfinished block and T new ones, (B, r + T, D)."""
        return [block.join(x_BTD) for block in self.unfinished]


class RetinaState(State):
    """A cache for each layer. What has left a window is forgotten; only open windows cost more as a text grows."""

    def __init__(self, config: RetinaConfig, batch_size: int, caches: list[WindowCache]) -> None:
        super().__init__(config, batch_size)
        self.caches = caches

    def rotations(self, model: Retina, x_BTD: Tensor) -> dict[int, Tensor | None] | None:
        """``Retina.rotations`` of the next tokens."""
        return model.rotations(self.length, x_BTD)

    def parts(self) -> Iterable[KeyValueCache | UnfinishedBlock]:
        return [part for cache in self.caches for part in cache.parts()]


class Retina(LanguageModel[RetinaState]):
    """Layers over token positions, each of which sees all scales of its input."""

    def __init__(self, config: RetinaConfig) -> None:
        super().__init__(config)
        self.turns = config.turns
        turns = islice(cycle(self.turns), config.layers)
        self.layers = TypedList(ResidualLayer(config, RetinaAttention(config, own), config.layers) for own in turns)
        self.norm = config.last_norm()
        self.reset_parameters()

    def features(self, tokens_BT: Tensor, state: RetinaState | None = None) -> Tensor:
        if state is not None and state.length:
            pieces = tokens_BT.split(_AT_A_TIME, dim=1)
            return torch.cat([self._features(piece_BT, state) for piece_BT in pieces], dim=1)
        return self._features(tokens_BT, state)

    def _features(self, tokens_BT: Tensor, state: RetinaState | None) -> Tensor:
        start = state.position if state is not None else 0
        x_BTD = self.embed(tokens_BT, start)
        rotations = state.rotations(self, x_BTD) if state is not None else self.rotations(0, x_BTD)
        pasts = state.caches if state is not None else [None] * len(self.layers)
        for layer, past in zip(self.layers, pasts):
            # Each layer pools its own input to every scale (``RetinaAttention.project``).
            x_BTD = layer(x_BTD, past, rotations)
        if state is not None:
            state.move_on(tokens_BT.size(1))
        return self.norm(x_BTD)

    def rotations(self, start: int, x_BTD: Tensor) -> dict[int, Tensor | None]:
        """By factor k, ``rotation_after`` of the blocks that the T tokens of x complete, after ``start`` others."""
        factors = {scale.factor for turn in self.turns for scale in turn}
        return {factor: self.config.rotation_after(start, x_BTD.size(1), x_BTD, factor) for factor in factors}

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """By scale k, the keys and values of its heads in the last layer, (B, T // k, 2 * K * H)."""
        x_BTD = self.embed(tokens_BT)
        rotations = self.rotations(0, x_BTD)
        *first, last = list(self.layers)
        for layer in first:
            x_BTD = layer(x_BTD, None, rotations)
        # Before norms and rotation; queries of all heads come first.
        fine, coarse = last.attention.project(x_BTD)
        return dict(zip(last.attention.key_heads_of, [fine[..., last.attention.out.in_features :], *coarse]))

    def new_state(self, batch_size: int, capacity: int = 0, device: torch.device | None = None) -> RetinaState:
        self.check_batch_size(batch_size)
        like, room = self.embed.like(device), self.room(capacity)
        caches = [layer.attention.new_cache(batch_size, room, like) for layer in self.layers]
        return RetinaState(self.config, batch_size, caches)
