"""The first phase of training HAED and HRED: the implicit embedding matrix (HAED, Section 3.2, equations 4 and 5).

Encoder and main model learn to tell the next chunk from other candidates, without a decoder. A chunk's encoding is its
row of an embedding matrix of all chunks, which nobody could store.
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
    """The loss, and how the positives rank.

    Attributes:
        loss: sum over the X positives of -log p, in nats
        rank_X: different candidates that score at least as high as the positive
        negatives_X: negatives of each positive; repetitions count
    """

    loss: Tensor
    rank_X: Tensor
    negatives_X: Tensor


def sampled_softmax(query_XE: Tensor, positive_X: Tensor, encoding_YE: Tensor, counts_Y: Tensor) -> SampledSoftmax:
    """Softmax of each positive among all candidates (HAED, Section 3.2, equations 4 and 5).

    The candidates are Y *different* chunks, of which one that occurs n times contributes n exp(score). The positive
    contributes once, however often it occurs: copies of it are no negatives. Queries are main outputs, and candidates
    with a count of 0 are ignored.
    """
    score_XY = query_XE @ encoding_YE.t()
    # At least float32, for the sum over thousands of candidates.
    score_XY = score_XY.to(torch.promote_types(score_XY.dtype, torch.float32))
    positive_X1 = positive_X.unsqueeze(1)
    own_X1 = score_XY.gather(1, positive_X1)
    with torch.no_grad():
        ahead_XY = (score_XY >= own_X1) & (counts_Y > 0)
        rank_X = ahead_XY.scatter_(1, positive_X1, False).sum(dim=1)
        negatives_X = counts_Y.sum() - counts_Y[positive_X]
    weighted_XY = (score_XY + counts_Y.to(score_XY.dtype).log()).scatter_(1, positive_X1, own_X1)
    return SampledSoftmax(F.cross_entropy(weighted_XY, positive_X, reduction="sum"), rank_X, negatives_X)


class ImplicitEmbedding(nn.Module):
    """Segmentation, chunk encoder and main model, whose outputs are compared with the encodings of chunks.

    Args:
        config: the sizes of the model of the second phase
        projected: compare by a learned projection D -> E, in place of equation 4's plain product with the first E
            channels of an output
    """

    def __init__(self, config: HAEDConfig, projected: bool) -> None:
        super().__init__()
        self.segmentation, self.encoder, self.main = hierarchy(config)
        self.query = projection(config.dim, self.encoder.out_dim) if projected else None
        initialise_chunks(self, config.init_std)

    def forward(self, tokens_BT: Tensor, candidates_AL: Tensor, counts_A: Tensor) -> SampledSoftmax:
        """Score each chunk that is predicted against the different candidates, those of this batch among them.

        Tokens include the last target; they and the candidates are padded on the right.
        """
        chunks = self.segmentation(tokens_BT, skip_padding=True)
        # Chunks that are read and candidates are mostly the same: each is encoded once.
        distinct_YL, index, _ = unique_chunks(torch.cat([chunks.tokens_WL, candidates_AL]))
        read_W, candidate_A = index.split([chunks.tokens_WL.shape[0], candidates_AL.shape[0]])
        e_YE = self.encoder.encode(distinct_YL)
        main_WD = self.main(e_YE.index_select(0, read_W), chunks)
        # The output after a chunk predicts the next one; nothing predicts the first of a row.
        predicted_X = (chunks.index_W > 0).nonzero().squeeze(1)
        main_XD = main_WD.index_select(0, predicted_X - 1)
        query_XE = main_XD[:, : self.encoder.out_dim] if self.query is None else self.query(main_XD)
        counts_Y = counts_A.new_zeros(e_YE.shape[0]).index_copy_(0, candidate_A, counts_A)
        return sampled_softmax(query_XE, read_W[predicted_X], e_YE, counts_Y)
