"""Transformer-XL's layer: attention over memory and segment by content and distance, and the feed-forward block."""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.modules.config import LayerConfig
from fairseq_ms.modules.transformer import FeedForward
from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.recompute import Dropout
from fairseq_ms.ops.relative_attention import hide_future, relative_attention, shift_rows


class Past(Protocol):
    """Keys and values of what comes before the segment, and the projected sinusoids of all distances.

    ``distances_PNH`` has a row for every distance to the oldest key, farthest first, and one for -1.
    """

    distances_PNH: Tensor

    def append(self, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, N, S, H) of the past and of T more positions."""


class RelativeAttention(nn.Module):
    """Multi-head attention from a segment to itself and to the past before it, by content and distance.

    Args:
        config: sizes and probabilities; pre-LN layers normalise segment and memory
        biases: u and v, (2, N, H), shared by all layers of a model
    """

    def __init__(self, config: LayerConfig, biases: nn.Parameter) -> None:
        super().__init__()
        dim = config.dim
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.recompute = config.recompute
        self.norm = nn.LayerNorm(dim) if config.normalize_before else None
        self.qkv = Linear(dim, 3 * dim, bias=False)
        self.position = Linear(dim, dim, bias=False)
        self.out = Linear(dim, dim, bias=False)
        self.biases = biases

    def forward(
        self,
        x_BTD: Tensor,
        positions_PD: Tensor | None,
        past: Tensor | Past,
    ) -> Tensor:
        """Attend over the past and x, (B, T, D) -> (B, T, D).

        Args:
            x_BTD: the segment
            positions_PD: ``sinusoids`` of at least as many keys as there are, for a past given as states
            past: the states of the memory (B, M, D), or its keys and values, to which those of x are added
        """
        if isinstance(past, Tensor):
            assert positions_PD is not None
            return self._over_states(x_BTD, positions_PD, past.detach())
        return self._over_cache(self.norm(x_BTD) if self.norm is not None else x_BTD, past)

    def distances(self, positions_PD: Tensor) -> Tensor:
        """The projected sinusoids r, (P, N, H), of distances."""
        return self.position(positions_PD).unflatten(-1, (self.heads, -1))

    def keys_values(self, states_BMD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, N, M, H) of states of a memory."""
        states_BMD = self.norm(states_BMD) if self.norm is not None else states_BMD
        kv = F.linear(states_BMD, self.qkv.weight[self.qkv.in_features :])
        k, v = kv.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return k, v

    def _over_states(self, x_BTD: Tensor, positions_PD: Tensor, memory_BMD: Tensor) -> Tensor:
        keys = memory_BMD.size(1) + x_BTD.size(1)
        r_PNH = self.distances(positions_PD[-(keys + 1) :])
        dropout = self.dropout if self.training else 0.0
        y = relative_attention(
            x_BTD, memory_BMD, self.norm, self.qkv.weight, r_PNH, self.biases, dropout, self.recompute
        )
        return self.out(y)

    def _over_cache(self, x_BTD: Tensor, past: Past) -> Tensor:
        # (B, T, 3 * N * H) -> 3 of (B, N, T, H)
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        k, v = past.append(k, v)
        keys = k.size(2)
        u_NH, v_NH = self.biases.unbind(0)
        by_distance = (q + v_NH[:, None]) @ past.distances_PNH[-(keys + 1) :].permute(1, 2, 0)
        bias = hide_future(shift_rows(by_distance, keys) / math.sqrt(q.size(-1)))
        y = F.scaled_dot_product_attention(q + u_NH[:, None], k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).flatten(2))


class RelativeLayer(nn.Module):
    """Attention over [memory, segment] and feed-forward, each beside a residual connection, pre-LN or post-LN.

    Args:
        config: sizes and probabilities
        biases: u and v, (2, N, H), shared by all layers of a model
    """

    def __init__(self, config: LayerConfig, biases: nn.Parameter) -> None:
        super().__init__()
        self.attention = RelativeAttention(config, biases)
        self.ffn = FeedForward(config)
        self.drop = Dropout(config.dropout, config.recompute)
        self.pre_norm = config.normalize_before
        if not self.pre_norm:
            self.after_attention, self.after_ffn = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)

    def norm_of_attention(self) -> nn.LayerNorm:
        """In front of the attention in a pre-LN layer, behind its residual connection in a post-LN one."""
        return self.attention.norm if self.attention.norm is not None else self.after_attention

    def norm_of_ffn(self) -> nn.LayerNorm:
        """As ``norm_of_attention``, of the feed-forward block."""
        return self.ffn.norm if self.ffn.norm is not None else self.after_ffn

    def forward(self, x_BTD: Tensor, positions_PD: Tensor | None, past: Tensor | Past) -> Tensor:
        """x (B, T, D) -> (B, T, D); the arguments are ``RelativeAttention``'s."""
        if self.pre_norm:
            x_BTD = x_BTD + self.drop(self.attention(x_BTD, positions_PD, past))
            return x_BTD + self.drop(self.ffn(x_BTD))
        x_BTD = self.after_attention(x_BTD + self.drop(self.attention(x_BTD, positions_PD, past)))
        return self.after_ffn(x_BTD + self.drop(self.ffn(x_BTD)))
