"""The retina: near tokens fine and far tokens coarse (Multi-scale Transformer LMs, Section 3.4, Listing 3, Table 4).

In every layer, some heads see near tokens one by one and others see far ones in blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_ms.core.cache import LastInputs, State, UnfinishedBlock
from fairseq_ms.core.layers import Downsample, LayerConfig, QueryKey, ResidualLayer, TypedList
from fairseq_ms.core.model import LanguageModel, ModelConfig
from fairseq_ms.core.ops.attention import attend, merge_heads, split_heads
from fairseq_ms.core.ops.linear import norm_linear, norm_linear_and_normed, projection
from fairseq_ms.core.ops.window_attention import HeadGroup, Layouts, window_attention_linear
from fairseq_ms.core.scales import Scale, check_scales, share_heads


@dataclass(frozen=True, kw_only=True)
class RetinaConfig(ModelConfig):
    """Sizes of a ``Retina``.

    Attributes:
        layers: how many
        scales: finest first, each with its window in tokens and as many of the ``heads``, unless they name their own;
            1x alone is local attention
        downsampler: "avg", "max" or "conv"
    """

    layers: int = 12
    scales: tuple[Scale, ...] = (
        Scale(1, near=0, far=8),
        Scale(4, near=8, far=256),
        Scale(16, near=256, far=512),
    )
    downsampler: str = "avg"


def head_groups(scales: Iterable[Scale]) -> list[HeadGroup]:
    """The windows of scales, each with its heads."""
    return [HeadGroup(scale.factor, scale.near, scale.far, scale.heads) for scale in scales]


class RetinaAttention(nn.Module):
    """Multi-head attention whose heads look at several scales of the layer's input, each through its window.

    Queries come from every position. Keys and values of a coarse scale are projected from the normalised input
    pooled at that scale. With the single scale 1x it is plain local attention (Multi-scale Transformer LMs,
    Section 3.4, Listing 3, Table 4).

    Args:
        config: sizes and probabilities
        groups: the heads by scale, 1x first, whose number divides D
        downsampler: "avg", "max" or "conv"
    """

    def __init__(self, config: LayerConfig, groups: Sequence[HeadGroup], downsampler: str = "avg") -> None:
        super().__init__()
        dim, heads = config.dim, sum(group.heads for group in groups)
        assert groups[0].factor == 1
        assert dim % heads == 0
        self.config, self.groups = config, list(groups)
        self.head_dim = dim // heads
        self.dropout = config.attention_dropout
        self.recompute = config.recompute
        self.norm, self.short_conv = config.norm_before(), config.short_convolution()
        finest, *widths = [group.heads * self.head_dim for group in groups]
        rows = (dim, finest, finest)
        self.fine = projection(dim, sum(rows), config.bias, rows)
        self.pools = TypedList(Downsample(downsampler, dim, group.factor) for group in groups[1:])
        self.coarse = TypedList(projection(dim, 2 * width, config.bias, rows=2 * (width,)) for width in widths)
        self.qk = QueryKey(config, self.head_dim, heads)
        self.out = projection(dim, dim, config.bias)

    def forward(
        self,
        x_BTD: Tensor,
        layouts: Layouts | None,
        past: WindowCache | None = None,
        rotations: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D).

        At the beginning of texts, with the windows laid out for T tokens; after ``past``, through its windows.
        ``rotations`` are of the T positions and, by coarse scale, of where its new blocks begin.
        """
        fine, coarse = self.project(x_BTD, past)
        # Queries of all scales lie in front of the keys of the first.
        queries = [sum(group.heads for group in self.groups), *[0] * len(coarse)]
        keys = [group.heads for group in self.groups]
        fine, *coarse = map(self.qk, [fine, *coarse], queries, keys, rotations or [None] * len(keys))
        if past is not None:
            past.append([fine[..., x_BTD.size(-1) :], *coarse])
        if layouts is None:
            assert past is not None
            queries_BTD = fine[..., : x_BTD.size(-1)]
            return self.out(past.attend(queries_BTD.split([count * self.head_dim for count in keys], dim=-1)))
        dropout = self.dropout if self.training else 0.0
        return window_attention_linear(fine, coarse, layouts, self.head_dim, self.out, dropout, self.recompute)

    def project(self, x_BTD: Tensor, past: WindowCache | None = None) -> tuple[Tensor, list[Tensor]]:
        """Queries, keys and values at 1x, (B, T, D + 2 * N * H), and keys and values of the other scales."""
        read = x_BTD, self.norm, self.fine, self.recompute, self.short_conv, past.windows[0].before if past else None
        if not self.coarse:
            return norm_linear(*read), []
        fine, normed = norm_linear_and_normed(*read)
        coarse = []
        for level, (group, pool, project) in enumerate(zip(self.groups[1:], self.pools, self.coarse)):
            joined = normed if past is None else past.unfinished[level].join(normed)
            whole = joined.size(1) - joined.size(1) % group.factor
            if past is not None and not whole:
                coarse.append(fine[:, :0, : 2 * group.heads * self.head_dim])
            else:
                coarse.append(project(pool(joined[:, :whole])))
        return fine, coarse

    def new_cache(self, batch_size: int, like: Tensor) -> WindowCache:
        """An empty one, of the type and on the device of ``like``."""
        sizes = [(group.heads, self.head_dim, -(-group.far // group.factor) + 1) for group in self.groups]
        windows = [SlidingCache(batch_size, *size, like) for size in sizes]
        windows[0].before = self.config.last_inputs(batch_size, like)
        return WindowCache(
            self.groups, windows, [UnfinishedBlock(batch_size, group.factor, like) for group in self.groups[1:]]
        )

    def keys_and_values(self, x_BTD: Tensor) -> list[Tensor]:
        """What the heads of each scale look at, finest first: keys beside values, (B, T // k, 2 * N * H).

        Keys are as they are before a rotation.
        """
        fine, coarse = self.project(x_BTD)
        return [fine[..., x_BTD.size(-1) :], *coarse]


class RetinaLayer(ResidualLayer):
    """``RetinaAttention`` and feed-forward."""

    attention: RetinaAttention
    past = 1

    def __init__(self, config: RetinaConfig, groups: Sequence[HeadGroup]) -> None:
        super().__init__(config, RetinaAttention(config, groups, config.downsampler), config.layers)


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
        # What the layer's short convolution remembers, if it has one.
        self.before: LastInputs | None = None

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

    def read(self, q_BNTH: Tensor, group: HeadGroup, length: int) -> Tensor:
        """What queries at the last T of ``length`` tokens see through their window, (B, N, T, H)."""
        start = length - q_BNTH.size(2)
        first, end = max(0, group.first_visible(start)), group.last_visible(length - 1) + 1
        if first >= end:
            return torch.zeros_like(q_BNTH)
        k, v = self.view(first, end)
        if q_BNTH.size(2) == 1:
            return attend(q_BNTH, k, v)
        rows = torch.arange(start, length, device=q_BNTH.device)[:, None]
        visible = group.visible(rows, torch.arange(first, end, device=q_BNTH.device))
        # A query that sees nothing attends to everything, so that no softmax is empty, and its result is zeroed.
        sees_a_key = visible.any(-1, keepdim=True)
        bias = q_BNTH.new_zeros(visible.shape).masked_fill_(~visible & sees_a_key, -torch.inf)
        return attend(q_BNTH, k, v, bias=bias) * sees_a_key

    def kept(self) -> tuple[Tensor, int]:
        """As those of a ``KeyValueCache``."""
        return self.buffer[:, :, :, : self.end - self.first], self.end

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        self.buffer = self.buffer.index_select(1, order)
        if self.before is not None:
            self.before.reorder(order)


class WindowCache:
    """What one layer remembers.

    Args:
        groups: its heads by scale
        windows: by scale, the last keys and values that its window can see
        unfinished: by coarse scale, the normalised positions that wait to be pooled
    """

    def __init__(
        self, groups: Sequence[HeadGroup], windows: Sequence[SlidingCache], unfinished: Sequence[UnfinishedBlock]
    ) -> None:
        self.groups, self.windows, self.unfinished = groups, windows, unfinished

    @property
    def length(self) -> int:
        """How many tokens have been read."""
        return self.windows[0].end

    def parts(self) -> list[SlidingCache | UnfinishedBlock]:
        """Everything that has a row for each text."""
        return [*self.windows, *self.unfinished]

    def append(self, pairs: Sequence[Tensor]) -> None:
        """Take in keys beside values (B, C, 2 * N * H) of each scale's new positions."""
        for group, window, pair_BCD in zip(self.groups, self.windows, pairs):
            # (B, C, 2 * N * H) -> keys and values, (B, N, C, H) each
            k, v = pair_BCD.unflatten(-1, (2, group.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            window.append(k, v)

    def attend(self, queries: Sequence[Tensor]) -> Tensor:
        """What the queries (B, T, N * H) of every scale at the last T positions see, (B, T, D)."""
        heads = [
            merge_heads(window.read(split_heads(q_BTD, group.heads), group, self.length))
            for group, window, q_BTD in zip(self.groups, self.windows, queries)
        ]
        return torch.cat(heads, dim=-1)


class RetinaState(State):
    """The windows of every layer; what has left them is forgotten, so the cost of a token does not grow."""

    def __init__(self, config: RetinaConfig, batch_size: int, caches: list[WindowCache]) -> None:
        super().__init__(config, batch_size)
        self.caches = caches

    def parts(self) -> Iterable[SlidingCache | UnfinishedBlock]:
        return [part for cache in self.caches for part in cache.parts()]


class Retina(LanguageModel):
    """Layers over token positions, each of which looks at all scales of its input."""

    def __init__(self, config: RetinaConfig) -> None:
        super().__init__(config)
        check_scales(config.scales)
        if config.head_dim is not None:
            raise ValueError(f"head_dim must be left out, since the heads of a retina share dim: got {config.head_dim}")
        if config.sinks:
            raise ValueError("sinks must be left out with windows: got True")
        scales = share_heads(config.scales, config.heads)
        for scale in scales:
            window, k = f"{scale}={scale.near}:{scale.far}", scale.factor
            if scale.far - scale.near < k:
                raise ValueError(f"scales must have a window near:far of at least {k} tokens at {scale}: got {window}")
            if scale.near < k - 1:
                rule = f"scales must begin {scale} at {k - 1} or farther, since the newest block may be unfinished"
                raise ValueError(f"{rule}: got {window}")
        self.groups, self.head_dim = head_groups(scales), config.dim // config.heads
        self.layers = TypedList(RetinaLayer(config, self.groups) for _ in range(config.layers))
        self.norm = config.last_norm()
        self.reset_parameters()

    def features(self, tokens_BT: Tensor, state: RetinaState | None = None) -> Tensor:  # type: ignore[override]
        if state is not None and state.length:
            # A window remembers as many keys as one piece of this length needs.
            pieces = tokens_BT.split(self.groups[0].far, dim=1)
            return torch.cat([self._features(piece_BT, state, None) for piece_BT in pieces], dim=1)
        return self._features(tokens_BT, state, self._masks(tokens_BT))

    def _features(self, tokens_BT: Tensor, state: RetinaState | None, attention_masks: Layouts | None) -> Tensor:
        start = state.position if state is not None else 0
        x_BTD = self.embed(tokens_BT, start)
        rotations = self._rotations(start, x_BTD)
        pasts = state.caches if state is not None else [None] * len(self.layers)
        for layer, past in zip(self.layers, pasts):
            # Downsampled to all scales, and attended to through each scale's window.
            x_BTD = layer(x_BTD, attention_masks, past, rotations)
        if state is not None:
            state.move_on(tokens_BT.size(1))
        return self.norm(x_BTD)

    def _rotations(self, start: int | Tensor, x_BTD: Tensor) -> list[Tensor | None]:
        """By scale, the rotation of where the blocks begin that the T tokens after ``start`` others finish."""
        of_scale, count = self.config.rotation_after, x_BTD.size(1)
        return [of_scale(start, count, x_BTD, group.factor, self.head_dim) for group in self.groups]

    def _masks(self, tokens_BT: Tensor) -> Layouts:
        return Layouts(self.groups, tokens_BT.size(1), tokens_BT.device)

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """By scale k, the keys and values that its heads in the last layer look at, (B, T // k, 2 * N * H)."""
        x_BTD, attention_masks = self.embed(tokens_BT), self._masks(tokens_BT)
        rotations = self._rotations(0, x_BTD)
        *first, last = list(self.layers)
        for layer in first:
            x_BTD = layer(x_BTD, attention_masks, None, rotations)
        return dict(zip((group.factor for group in self.groups), last.attention.keys_and_values(x_BTD)))

    def new_state(self, batch_size: int, capacity: int = 0) -> RetinaState:
        like = self.embed.like()
        return RetinaState(
            self.config, batch_size, [layer.attention.new_cache(batch_size, like) for layer in self.layers]
        )
