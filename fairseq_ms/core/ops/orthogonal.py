"""Muon's orthogonalisation, for many matrices in as few launches as for one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def orthogonalised(
    matrices: Sequence[Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Approximate the nearest orthogonal matrices of M matrices (O, I) of one shape: (M, O, I) in bfloat16.

    Newton-Schulz iterations X <- a X + (b X X^T + c (X X^T)^2) X of the matrices over their norms, as in
    ``torch.optim.Muon``, up to the rounding of bfloat16 products, which may differ for a batch.
    Source: https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = coefficients
    first = matrices[0]
    x_MOI = torch.empty((len(matrices), *first.shape), dtype=torch.bfloat16, device=first.device)
    torch._foreach_copy_(x_MOI.unbind(0), list(matrices))
    # One norm for each matrix, added up in the order of a single one.
    norms_M = torch.stack(torch._foreach_norm(x_MOI.unbind(0))).clamp(min=eps)
    tall = x_MOI.size(1) > x_MOI.size(2)
    x = (x_MOI.mT if tall else x_MOI).div_(norms_M[:, None, None])
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
