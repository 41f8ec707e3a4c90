"""Cross-entropy from features and the output matrix, with the logits of only some rows in memory at a time.

The forward pass already computes gradients: those of logits are written over them, and added up to those of features
and matrix, which the backward pass only multiplies by the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_ms.core.ops.linear import SomeSymbols, TiedOutput
from fairseq_ms.core.ops.recompute import autocast_to, plain, refuse_second_derivatives

# Logits in memory at a time (32 MB in float32 on a CPU, 256 MB in half precision on a GPU), and the most rows of them.
_LOGITS_ON_A_CPU, _LOGITS, _ROWS = 2**23, 2**27, 4096
# In half precision, the softmax in float32 is of one of so many parts of them at a time.
_PARTS = 8

# Factor of gradients in float16 until the backward pass, so that probabilities above 2**-34 count. Gradients of
# features stay finite while the entries of the matrix are below 32.
_SCALE_OF_FLOAT16 = 2.0**10


def linear_cross_entropy(
    x_QD: Tensor, weight_VD: Tensor, targets: Tensor, padding: int, reduce: bool = True, never: Sequence[int] = ()
) -> Tensor:
    """-log softmax(x W^T)[target] in nats, 0 where the target is padding: the sum (), or all without ``reduce``.

    Targets are (Q,), or (Q, K) where K of them share a row; symbols in ``never`` have no probability. Logits have the
    type of ``F.linear``, and all else is computed at least in float32. The sum goes backward once; without ``reduce``,
    backward computes the logits again.
    """
    targets_QK = targets.view(len(targets), -1)
    if reduce and torch.is_grad_enabled() and (x_QD.requires_grad or weight_VD.requires_grad):
        return _Sum.apply(x_QD, weight_VD, targets_QK, padding, never)

    def losses(x_RD: Tensor, targets_RK: Tensor) -> Tensor:
        return _of_logits(_logits(x_RD, weight_VD, never), targets_RK, padding)

    again = partial(checkpoint, losses, use_reentrant=False, preserve_rng_state=False)
    losses_QK = torch.cat([again(*rows) for rows in _split(weight_VD, x_QD, targets_QK)])
    return losses_QK.sum() if reduce else losses_QK.view_as(targets)


def cross_entropy_of(x_QD: Tensor, project: nn.Module, targets: Tensor, padding: int, reduce: bool = True) -> Tensor:
    """``linear_cross_entropy`` by the matrix of a projection, which is called, for all logits, if it is not plain."""
    if (matrix := matrix_of(project, x_QD.device)) is None:
        losses_QK = _of_logits(project(x_QD), targets.view(len(targets), -1), padding)
        return losses_QK.sum() if reduce else losses_QK.view_as(targets)
    weight_VD, never = matrix
    if (bias_V := getattr(project, "bias", None)) is not None:
        # The bias is one more column of the matrix.
        x_QD, weight_VD = F.pad(x_QD, (0, 1), value=1.0), torch.cat([weight_VD, bias_V.unsqueeze(1)], dim=1)
    return linear_cross_entropy(x_QD, weight_VD, targets, padding, reduce, never)


def matrix_of(project: nn.Module, device: torch.device | None = None) -> tuple[Tensor, tuple[int, ...]] | None:
    """The matrix (V, D) of a projection and the symbols that it never predicts; None if it has to be called.

    A tied embedding that is not plain computes its matrix on ``device``, by default that of its weights.
    """
    inner: Any = project
    never: tuple[int, ...] = ()
    if plain(project, SomeSymbols):
        inner, never = inner.project, inner.never
    # A bias inside is out of the caller's sight.
    biased = inner is not project and getattr(inner, "bias", None) is not None
    if biased or not plain(inner, nn.Linear, TiedOutput):
        return None
    return (inner.matrix(device) if isinstance(inner, TiedOutput) else inner.weight), never


@torch.no_grad()
def most_probable(x_QD: Tensor, weight_VD: Tensor, never: Sequence[int] = ()) -> Tensor:
    """The symbol with the largest logit in every row, (Q,)."""
    return torch.cat([_logits(x_RD, weight_VD, never).argmax(1) for (x_RD,) in _split(weight_VD, x_QD)])


def _logits(x_RD: Tensor, weight_VD: Tensor, never: Sequence[int]) -> Tensor:
    logits_RV = F.linear(x_RD, weight_VD)
    if never:
        places = torch.tensor(never, device=logits_RV.device)
        logits_RV.index_fill_(1, places, torch.finfo(logits_RV.dtype).min)
    return logits_RV


def _of_logits(logits_RV: Tensor, targets_RK: Tensor, padding: int) -> Tensor:
    """The loss of each target, (R, K), from logits (R, V)."""
    log_probs_RV = logits_RV.log_softmax(1, dtype=_precise(logits_RV.dtype))
    padded_RK = targets_RK == padding
    return -log_probs_RV.gather(1, targets_RK.masked_fill(padded_RK, 0)).masked_fill(padded_RK, 0.0)


class _Sum(torch.autograd.Function):
    """The sum of all losses, with the gradients of features and matrix."""

    @staticmethod
    def forward(ctx, x_QD: Tensor, weight_VD: Tensor, targets_QK: Tensor, padding: int, never: Sequence[int]) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.types = x_QD.dtype, weight_VD.dtype
        dtype = F.linear(x_QD[:0], weight_VD).dtype  # autocast may choose another one
        ctx.scale = _SCALE_OF_FLOAT16 if dtype == torch.float16 else 1.0
        with autocast_to(x_QD.device, None):
            x_QD, weight_VD = x_QD.to(dtype), weight_VD.to(dtype)
            loss = torch.zeros((), dtype=_precise(dtype), device=x_QD.device)
            grad_x_QD = torch.empty_like(x_QD) if needs_x else None
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=loss.dtype) if needs_weight else None
            pieces = _split(weight_VD, x_QD, targets_QK, x_QD if grad_x_QD is None else grad_x_QD)
            for x_RD, targets_RK, grad_RD in pieces:
                logits_RV = _logits(x_RD, weight_VD, never)
                loss += _differentiate(logits_RV, targets_RK, padding, ctx.scale)
                if grad_x_QD is not None:
                    torch.mm(logits_RV, weight_VD, out=grad_RD)
                if grad_weight_VD is not None:
                    _add_product(grad_weight_VD, logits_RV.t(), x_RD)
        ctx.grad_x, ctx.grad_weight = grad_x_QD, grad_weight_VD
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        refuse_second_derivatives("linear_cross_entropy")
        gradients = ctx.grad_x, ctx.grad_weight
        if gradients == (None, None):
            raise RuntimeError("linear_cross_entropy goes backward once: compute the loss again")
        # Scaled in place, and freed before the graph is.
        ctx.grad_x = ctx.grad_weight = None
        return *(_times(one, grad / ctx.scale, dtype) for one, dtype in zip(gradients, ctx.types)), *[None] * 3


def _differentiate(logits_RV: Tensor, targets_RK: Tensor, padding: int, scale: float) -> Tensor:
    """The sum of the losses of some rows; their gradients, times ``scale``, are written over the logits."""
    precise = _precise(logits_RV.dtype)
    rows = len(logits_RV) if logits_RV.dtype == precise else -(-len(logits_RV) // _PARTS)
    losses = []
    for part_RV, part_RK in zip(logits_RV.split(max(1, rows)), targets_RK.split(max(1, rows))):
        index_RK, counts_RK = part_RK.masked_fill(part_RK == padding, 0), (part_RK != padding).to(precise)
        target_RK, (largest_R1, best_R1) = part_RV.gather(1, index_RK), part_RV.max(1, keepdim=True)
        # In place, or in one pass from half precision.
        probs_RV = torch.softmax(part_RV, 1, precise, out=part_RV if part_RV.dtype == precise else None)
        # The largest probability is 1 / sum(exp(logits - largest logit)).
        above_RK = largest_R1.to(precise) - target_RK
        losses.append(((above_RK - probs_RV.gather(1, best_R1).log()) * counts_RK).sum())
        # For each of the K targets of a row, the gradient is all probabilities, minus 1 at the target.
        count_R1 = counts_RK.sum(1, keepdim=True)
        probs_RV.scatter_add_(1, index_RK, -counts_RK / count_R1.clamp(min=1.0))
        torch.mul(probs_RV, count_R1 * scale, out=part_RV)
    return torch.stack(losses).sum()


def _add_product(sum_VD: Tensor, left_VR: Tensor, right_RD: Tensor) -> None:
    """``sum += left @ right``, added in the type of the sum."""
    if left_VR.dtype != sum_VD.dtype and _adds_wider(sum_VD.device, left_VR.dtype, sum_VD.dtype):
        torch.addmm(sum_VD, left_VR, right_RD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        torch.addmm(sum_VD, left_VR.to(sum_VD.dtype), right_RD.to(sum_VD.dtype), out=sum_VD)


@cache
def _adds_wider(device: torch.device, dtype: torch.dtype, sum_dtype: torch.dtype) -> bool:
    """Whether torch's ``addmm`` adds products of one type to a sum of a wider type on a device."""
    left, total = torch.zeros(8, 8, device=device, dtype=dtype), torch.zeros(8, 8, device=device, dtype=sum_dtype)
    try:
        torch.addmm(total, left, left, out_dtype=sum_dtype, out=total)
    except (TypeError, RuntimeError):
        return False
    return True


def _times(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """``gradient * factor`` in a type, multiplied in the wider of the two types, perhaps in place."""
    if gradient is None:
        return None
    return gradient.to(torch.promote_types(gradient.dtype, dtype)).mul_(factor).to(dtype)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _split(weight_VD: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors by pieces of as many rows as may have logits at a time."""
    logits = _LOGITS_ON_A_CPU if weight_VD.device.type == "cpu" else _LOGITS
    rows = min(max(1, logits // len(weight_VD)), _ROWS)
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
