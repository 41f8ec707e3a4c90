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
        loss: sum over the N positives of -log p, in nats.
        rank_N: how many of the different candidates score no lower than the positive, which therefore is ahead of
            none when all encodings are the same.
        negatives_N: the number of negatives: repetitions count, the positive's own chunk does not.
    """

    loss: Tensor
    rank_N: Tensor
    negatives_N: Tensor


def sampled_softmax(
    query_NE: Tensor, positive_N: Tensor, encoding_UE: Tensor, counts_U: Tensor, log_q_U: Tensor | None = None
) -> SampledSoftmax:
    """-log of each positive's share against all candidates (HAED, Section 3.2, equations 4, 5).

    The candidates are given as the U *different* chunks among them with their numbers of occurrences, which says the
    same as a list with repetitions: a chunk that occurs n times contributes n exp(score). A candidate that is the
    same chunk as the positive is no negative, so the positive itself contributes once, however often it occurs.

    Args:
        query_NE: (N, E) projected main outputs.
        positive_N: (N,) which of the different chunks comes next.
        encoding_UE: (U, E) encodings of the different chunks.
        counts_U: (U,) how often each occurs among the candidates; one that never does is ignored.
        log_q_U: (U,) log probability of drawing each as a candidate, subtracted from all scores; None for no
            correction.
    """
    score_NU = query_NE @ encoding_UE.t()
    # The sum over thousands of candidates is taken in float32 under half precision, too.
    score_NU = score_NU.to(torch.promote_types(score_NU.dtype, torch.float32))
    if log_q_U is not None:
        score_NU = score_NU - log_q_U
    positive_N1 = positive_N.unsqueeze(1)
    own_N1 = score_NU.gather(1, positive_N1)
    with torch.no_grad():
        ahead_NU = (score_NU >= own_N1) & (counts_U > 0)
        rank_N = ahead_NU.scatter_(1, positive_N1, False).sum(dim=1)
        negatives_N = counts_U.sum() - counts_U[positive_N]
    # A candidate counts as often as it occurs, a positive once.
    weighted_NU = (score_NU + counts_U.to(score_NU.dtype).log()).scatter_(1, positive_N1, own_N1)
    return SampledSoftmax(F.cross_entropy(weighted_NU, positive_N, reduction="sum"), rank_N, negatives_N)
