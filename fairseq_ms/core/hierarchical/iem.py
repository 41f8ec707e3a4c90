"""The first phase of HAED and HRED: the implicit embedding matrix (HAED, Section 3.2, equations 4 and 5).

Encoder and main model are trained without a decoder: which chunk comes next, among given candidates? A chunk's
encoding stands for its row of an embedding matrix that could never be written out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.hierarchical.chunks import unique_chunks
from fairseq_ms.core.hierarchical.haed import HAEDConfig, hierarchy, initialise_chunks
from fairseq_ms.core.ops.linear import projection


@dataclass(frozen=True)
class SampledSoftmax:
    """What ``sampled_softmax`` finds.

    Attributes:
        loss: sum over the X positives of -log p, in nats.
        rank_X: how many of the different candidates score at least as high as the positive: all of them if all
            encodings are equal.
        negatives_X: how many negatives each has; every repetition counts, copies of the positive do not.
    """

    loss: Tensor
    rank_X: Tensor
    negatives_X: Tensor


def sampled_softmax(query_XE: Tensor, positive_X: Tensor, encoding_YE: Tensor, counts_Y: Tensor) -> SampledSoftmax:
    """-log of each positive's share against all candidates (HAED, Section 3.2, equations 4, 5).

    The candidates are Y *different* chunks and how often each occurs: one that occurs n times contributes n exp(score).
    A copy of the positive is not a negative, so the positive contributes once, however often it occurs.

    Args:
        query_XE: (X, E) projected main outputs.
        positive_X: (X,) which of the different chunks comes next.
        encoding_YE: (Y, E) encodings of the different chunks.
        counts_Y: (Y,) how often each occurs among the candidates; one that never does is ignored.
    """
    score_XY = query_XE @ encoding_YE.t()
    # The sum over thousands of candidates is taken in float32 under half precision, too.
    score_XY = score_XY.to(torch.promote_types(score_XY.dtype, torch.float32))
    positive_X1 = positive_X.unsqueeze(1)
    own_X1 = score_XY.gather(1, positive_X1)
    with torch.no_grad():
        ahead_XY = (score_XY >= own_X1) & (counts_Y > 0)
        rank_X = ahead_XY.scatter_(1, positive_X1, False).sum(dim=1)
        negatives_X = counts_Y.sum() - counts_Y[positive_X]
    # A candidate counts as often as it occurs, a positive once.
    weighted_XY = (score_XY + counts_Y.to(score_XY.dtype).log()).scatter_(1, positive_X1, own_X1)
    return SampledSoftmax(F.cross_entropy(weighted_XY, positive_X, reduction="sum"), rank_X, negatives_X)


class ImplicitEmbedding(nn.Module):
    """Segmentation, chunk encoder and main model, whose outputs are compared with the encodings of chunks.

    Args:
        config: the sizes of the model of the second phase.
        projected: compare by a learned projection D -> E instead of equation 4's plain product, for which encodings,
            E wide, are filled up with zeros: the first E entries of an output count.
    """

    def __init__(self, config: HAEDConfig, projected: bool) -> None:
        super().__init__()
        self.segmentation, self.encoder, self.main = hierarchy(config)
        self.query = projection(config.dim, self.encoder.out_dim) if projected else None
        initialise_chunks(self, config.init_std)

    def forward(self, tokens_BT: Tensor, candidates_AL: Tensor, counts_A: Tensor) -> SampledSoftmax:
        """Score each chunk that is predicted against the candidates.

        Args:
            tokens_BT: tokens, padded on the right, the last target included.
            candidates_AL: the different candidates, padded on the right, those of this batch among them.
            counts_A: how often each of them occurs.
        """
        chunks = self.segmentation(tokens_BT, skip_padding=True)
        # A chunk is encoded once, whether it is read or a candidate or, as most are, both.
        distinct_YL, index, _ = unique_chunks(torch.cat([chunks.tokens_WL, candidates_AL]))
        read_W, candidate_A = index.split([chunks.tokens_WL.shape[0], candidates_AL.shape[0]])
        e_YE = self.encoder.encode(distinct_YL)
        main_WD = self.main(e_YE.index_select(0, read_W), chunks)
        # The main model's output after a chunk predicts the next one; nothing predicts the first of a row.
        predicted_X = (chunks.index_W > 0).nonzero().squeeze(1)
        main_XD = main_WD.index_select(0, predicted_X - 1)
        query_XE = main_XD[:, : self.encoder.out_dim] if self.query is None else self.query(main_XD)
        counts_Y = counts_A.new_zeros(e_YE.shape[0]).index_copy_(0, candidate_A, counts_A)
        return sampled_softmax(query_XE, read_W[predicted_X], e_YE, counts_Y)
