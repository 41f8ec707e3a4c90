"""Negative log probabilities from features and the output matrix, without ever holding all logits.

Logits are N x V numbers, of which a training step would hold several copies. Here they exist for a few rows at a
time: torch computes the gradients with them, in the forward pass, where it can (from 2.13 on, in single precision);
elsewhere the rows are checkpointed, and their logits computed once more in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_ms.core.ops.recompute import autocast_dtype, recomputed

# More rows at a time are no faster, as measured on a CPU; a GPU needs more to be busy. What torch chooses by itself,
# 16 rows for 1,024 of 768 numbers and 31,300 symbols, takes 1.7 times as long there.
_ROWS_ON_A_CPU, _ROWS = 256, 1024


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, padding: int, reduce: bool = True
) -> Tensor:
    """-log softmax(x W^T)[target] in nats, 0 where the target is padding: the sum (), or (N,) without ``reduce``.

    In half precision and under autocast the logits are rounded as ``F.linear`` rounds them, and everything behind
    them is computed in float32, as fairseq's ``cross_entropy`` does.
    """
    if not _torch_has_it(x_ND, weight_VD):
        loss_N = checkpointed_cross_entropy(x_ND, weight_VD, target_N.unsqueeze(1), padding).squeeze(1)
        return loss_N.sum() if reduce else loss_N
    return F.linear_cross_entropy(
        x_ND,
        weight_VD,
        target_N,
        reduction="sum" if reduce else "none",
        ignore_index=padding,
        options=nn.LinearCrossEntropyOptions(batch_chunk_size=_rows(x_ND)),
    )


def checkpointed_cross_entropy(x_ND: Tensor, weight_VD: Tensor, targets_NK: Tensor, padding: int) -> Tensor:
    """-log softmax(x W^T) of K targets a row, (N, K), 0 for padding; the logits are computed again in backward."""
    rows = partial(_of_rows, padding=padding)
    losses = [
        checkpoint(rows, x_RD, weight_VD, targets_RK, use_reentrant=False, preserve_rng_state=False)
        for x_RD, targets_RK in _split(x_ND, targets_NK)
    ]
    return torch.cat(losses)


def above_mean(x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, padding: int) -> Tensor:
    """By how much the target's logit exceeds the mean of all V, (N,), 0 where the target is padding.

    It is what label smoothing adds to the loss: with e' = e V / (V - 1), fairseq's
    (1 - e') nll + e' (mean of all negative log probabilities) equals nll + e' (target's logit - mean logit).
    """

    def difference(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
        # Not in half precision: the mean of V small numbers, and the difference of two large ones.
        mean_D = weight_VD.mean(0, dtype=_precise(weight_VD.dtype))
        return (x_ND * (F.embedding(target_N, weight_VD) - mean_D)).sum(1).masked_fill(target_N == padding, 0.0)

    return recomputed(difference, x_ND, weight_VD)


@torch.no_grad()
def most_probable(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """The symbol with the largest logit in every row, (N,)."""
    return torch.cat([F.linear(x_RD, weight_VD).argmax(1) for (x_RD,) in _split(x_ND)])


def _torch_has_it(x_ND: Tensor, weight_VD: Tensor) -> bool:
    """Whether torch's own function exists and is as precise as fairseq's loss.

    In half precision it is not: a sum of losses in float16 overflows after some thousand tokens, and gradients that
    are computed before they are multiplied with the scale of the loss underflow. Nor does it know autocast.
    """
    precise = x_ND.dtype == weight_VD.dtype == _precise(x_ND.dtype)
    return hasattr(F, "linear_cross_entropy") and precise and autocast_dtype(x_ND.device.type) is None


def _of_rows(x_RD: Tensor, weight_VD: Tensor, targets_RK: Tensor, padding: int) -> Tensor:
    logits_RV = F.linear(x_RD, weight_VD)
    log_probs_RV = logits_RV.log_softmax(1, dtype=_precise(logits_RV.dtype))
    return -log_probs_RV.gather(1, targets_RK.clamp(min=0)).masked_fill(targets_RK == padding, 0.0)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rows(x_ND: Tensor) -> int:
    return _ROWS_ON_A_CPU if x_ND.device.type == "cpu" else _ROWS


def _split(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(_rows(tensor)) for tensor in tensors), strict=True)
