"""The position-wise feed-forward block of a transformer layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.ops.activation import ACTIVATIONS, ActivationDropout
from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.norm import norm_linear
from fairseq_ms.ops.recompute import pointwise_linear


class FeedForward(nn.Module):
    """Linear, activation, dropout, Linear.

    Args:
        dim: model dimension D
        hidden_dim: width between the two projections
        activation: a key of ``ACTIVATIONS`` (fairseq's names)
        dropout: probability of dropping an activation (fairseq's ``--activation-dropout``)
        recompute: keep only what the first projection gives, and compute the activation again in backward
    """

    def __init__(self, dim: int, hidden_dim: int, activation: str, dropout: float, recompute: bool) -> None:
        super().__init__()
        self.up = Linear(dim, hidden_dim)
        self.down = Linear(hidden_dim, dim)
        self.activation = activation
        self.dropout = dropout
        self.recompute = recompute

    def forward(self, x: Tensor, norm: nn.LayerNorm | None = None) -> Tensor:
        """x (..., D) -> (..., D); ``norm`` is applied to the input first."""
        hidden = norm_linear(x, norm, self.up, self.recompute)
        if not (self.recompute and torch.is_grad_enabled()):
            return self.down(F.dropout(ACTIVATIONS[self.activation](hidden), self.dropout, self.training))
        activation = ActivationDropout(self.activation, self.dropout if self.training else 0.0)
        return pointwise_linear(activation, self.down.weight, self.down.bias, hidden)
