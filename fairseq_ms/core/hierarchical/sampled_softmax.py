"""The implicit embedding matrix: predict the next chunk among those at hand, in the space of the encoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class SampledSoftmax:
    """What ``sampled_softmax`` finds.

    Attributes:
        loss: sum over the X positives of -log p, in nats.
        rank_X: how many of the different candidates score no lower than the positive, which therefore is ahead of
            none when all encodings are the same.
        negatives_X: the number of negatives: repetitions count, the positive's own chunk does not.
    """

    loss: Tensor
    rank_X: Tensor
    negatives_X: Tensor


def sampled_softmax(
    query_XE: Tensor, positive_X: Tensor, encoding_YE: Tensor, counts_Y: Tensor, log_q_Y: Tensor | None = None
) -> SampledSoftmax:
    """-log of each positive's share against all candidates (HAED, Section 3.2, equations 4, 5).

    The candidates are given as the Y *different* chunks among them with their numbers of occurrences, which says the
    same as a list with repetitions: a chunk that occurs n times contributes n exp(score). A candidate that is the
    same chunk as the positive is no negative, so the positive itself contributes once, however often it occurs.

    Args:
        query_XE: (X, E) projected main outputs.
        positive_X: (X,) which of the different chunks comes next.
        encoding_YE: (Y, E) encodings of the different chunks.
        counts_Y: (Y,) how often each occurs among the candidates; one that never does is ignored.
        log_q_Y: (Y,) log probability of drawing each as a candidate, subtracted from all scores; None for no
            correction.
    """
    score_XY = query_XE @ encoding_YE.t()
    # The sum over thousands of candidates is taken in float32 under half precision, too.
    score_XY = score_XY.to(torch.promote_types(score_XY.dtype, torch.float32))
    if log_q_Y is not None:
        score_XY = score_XY - log_q_Y
    positive_X1 = positive_X.unsqueeze(1)
    own_X1 = score_XY.gather(1, positive_X1)
    with torch.no_grad():
        ahead_XY = (score_XY >= own_X1) & (counts_Y > 0)
        rank_X = ahead_XY.scatter_(1, positive_X1, False).sum(dim=1)
        negatives_X = counts_Y.sum() - counts_Y[positive_X]
    # A candidate counts as often as it occurs, a positive once.
    weighted_XY = (score_XY + counts_Y.to(score_XY.dtype).log()).scatter_(1, positive_X1, own_X1)
    return SampledSoftmax(F.cross_entropy(weighted_XY, positive_X, reduction="sum"), rank_X, negatives_X)
