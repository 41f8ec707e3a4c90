"""Layers whose heads look at several scales through windows: near tokens fine, far tokens coarse."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fairseq_ms.modules.config import LayerConfig
from fairseq_ms.modules.pooling import Downsample
from fairseq_ms.modules.typed_list import TypedList
from fairseq_ms.ops.linear import Linear, norm_linear, norm_linear_and_normed
from fairseq_ms.ops.recompute import Dropout
from fairseq_ms.ops.window_attention import window_attention_linear
from fairseq_ms.ops.window_layout import HeadGroup, Layouts


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
        self.groups = list(groups)
        self.head_dim = dim // heads
        self.dropout = config.attention_dropout
        self.recompute = config.recompute
        self.norm = nn.LayerNorm(dim)
        self.fine = Linear(dim, dim + 2 * groups[0].heads * self.head_dim)
        self.pools = TypedList(Downsample(downsampler, dim, group.factor) for group in groups[1:])
        self.coarse = nn.ModuleList(Linear(dim, 2 * group.heads * self.head_dim) for group in groups[1:])
        self.out = Linear(dim, dim)

    def forward(self, x_BTD: Tensor, layouts: Layouts) -> Tensor:
        """x (B, T, D) -> (B, T, D), with the windows laid out for T tokens."""
        return self.attend(*self.project(x_BTD), layouts)

    def attend(self, fine: Tensor, coarse: list[Tensor], layouts: Layouts) -> Tensor:
        """The same from what ``project`` gives."""
        dropout = self.dropout if self.training else 0.0
        return window_attention_linear(fine, coarse, layouts, self.head_dim, self.out, dropout, self.recompute)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Queries, keys and values at 1x, (B, T, D + 2 * N * H), and keys and values of the other scales."""
        if not self.coarse:
            return norm_linear(x_BTD, self.norm, self.fine, self.recompute), []
        fine, normed = norm_linear_and_normed(x_BTD, self.norm, self.fine, self.recompute)
        coarse = []
        for pool, project in zip(self.pools, self.coarse):
            whole = x_BTD.size(1) - x_BTD.size(1) % pool.factor
            coarse.append(project(pool(normed[:, :whole])))
        return fine, coarse

    def keys_and_values(self, x_BTD: Tensor) -> list[Tensor]:
        """What the heads of each scale look at, finest first: keys beside values, (B, T // k, 2 * N * H)."""
        fine, coarse = self.project(x_BTD)
        return [fine[..., x_BTD.size(-1) :], *coarse]


class RetinaLayer(nn.Module):
    """``RetinaAttention`` and feed-forward, each beside a residual connection."""

    def __init__(self, config: LayerConfig, groups: Sequence[HeadGroup], downsampler: str = "avg") -> None:
        super().__init__()
        self.attention = RetinaAttention(config, groups, downsampler)
        self.ffn = config.feed_forward()
        self.drop = Dropout(config.dropout, config.recompute)

    def forward(self, x_BTD: Tensor, layouts: Layouts) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        x_BTD = x_BTD + self.drop(self.attention(x_BTD, layouts))
        return x_BTD + self.drop(self.ffn(x_BTD))
