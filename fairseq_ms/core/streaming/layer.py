"""Transformer-XL's layer and the shift of its memory: Compute and Shift of Transformer-QL, Figures 2b and 2d."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_ms.core.layers import LayerConfig
from fairseq_ms.core.ops.linear import Linear
from fairseq_ms.core.ops.recompute import Dropout, checkpointed
from fairseq_ms.core.ops.relative_attention import relative_attention_linear
from fairseq_ms.core.streaming.memory import Mems


class RelativeAttention(nn.Module):
    """Multi-head attention from a segment to itself and to the memory before it, by content and distance.

    Args:
        config: sizes and probabilities; pre-LN layers normalise segment and memory
        u_NH, v_NH: what queries by content and by distance have in common, shared by all layers of a model
    """

    def __init__(self, config: LayerConfig, u_NH: nn.Parameter, v_NH: nn.Parameter) -> None:
        super().__init__()
        dim, inner = config.dim, config.heads * config.width_of_head
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.recompute = config.recompute
        self.norm = nn.LayerNorm(dim) if config.normalize_before else None
        self.qkv = Linear(dim, 3 * inner, bias=False)
        # Not one that packs its weight: decoding projects the sinusoids once.
        self.position = nn.Linear(dim, inner, bias=False)
        self.out = Linear(inner, dim, bias=False)
        self.u, self.v = u_NH, v_NH

    def project(self, positions_PD: Tensor) -> Tensor:
        """The projected sinusoids r of distances, (P, D) -> (P, N, H)."""
        return self.position(positions_PD).unflatten(-1, (self.heads, -1))

    def forward(self, s_BTD: Tensor, m_BMD: Tensor, positions_PD: Tensor) -> Tensor:
        """Attend over memory and segment, (B, T, D) -> (B, T, D).

        Args:
            s_BTD: the segment
            m_BMD: the memory, to which no gradient goes
            positions_PD: ``sinusoids`` of at least as many keys as there are
        """
        r_PNH = self.project(positions_PD[-(m_BMD.size(1) + s_BTD.size(1) + 1) :])
        dropout = self.dropout if self.training else 0.0
        uv = self.u, self.v
        return relative_attention_linear(
            s_BTD, m_BMD.detach(), self.norm, self.qkv.weight, r_PNH, *uv, self.out, dropout, self.recompute
        )


class TransformerXLLayer(nn.Module):
    """Attention over memory and segment and feed-forward, each beside a residual connection.

    A post-LN layer, the figure's, normalises behind the residual connections; a pre-LN layer in front of attention and
    feed-forward, which own those norms.

    Args:
        config: sizes and probabilities
        u_NH, v_NH: Transformer-XL's u and v, shared by all layers of a model
    """

    def __init__(self, config: LayerConfig, u_NH: nn.Parameter, v_NH: nn.Parameter) -> None:
        super().__init__()
        self.attention = RelativeAttention(config, u_NH, v_NH)
        self.ffn = config.feed_forward()
        self.drop = Dropout(config.dropout, config.recompute)
        self.checkpoint = config.checkpoint
        behind = nn.Identity if config.normalize_before else nn.LayerNorm
        self.after_attention, self.after_ffn = behind(config.dim), behind(config.dim)

    def forward(self, s_BTD: Tensor, m_BMD: Tensor, positions_PD: Tensor) -> Tensor:
        """Compute of Transformer-QL, Figure 2b: segment (B, T, D) over memory (B, M, D) -> (B, T, D).

        The last argument is ``RelativeAttention``'s. A segment of no positions stays one.
        """
        if not s_BTD.size(1):
            return s_BTD
        if self.checkpoint:
            return checkpointed(self._compute, s_BTD, m_BMD, positions_PD)
        return self._compute(s_BTD, m_BMD, positions_PD)

    def _compute(self, s_BTD: Tensor, m_BMD: Tensor, positions_PD: Tensor) -> Tensor:
        s_BTD = self.after_attention(s_BTD + self.drop(self.attention(s_BTD, m_BMD, positions_PD)))
        return self.after_ffn(s_BTD + self.drop(self.ffn(s_BTD)))


def shift_all(moving: Mems, mems: Mems) -> Mems:
    """``shift`` of every state that moves, into the memory of its name."""
    return {name: shift(s_BTD, mems[name]) for name, s_BTD in moving.items()}


def shift(s_BTD: Tensor, m_BMD: Tensor) -> Tensor:
    """Shift of Transformer-QL, Figure 2d: ``concat(m, s)[-n_m:]``, the memory once s has moved in; no gradient."""
    moving, length = s_BTD.size(1), m_BMD.size(1)
    if moving >= length:
        return s_BTD[:, moving - length :].detach()
    return torch.cat([m_BMD[:, moving:], s_BTD.detach()], dim=1)
