"""The first phase of HAED and HRED: the implicit embedding matrix (HAED, Section 3.2, equations 4 and 5).

Encoder and main model are trained without a decoder: which chunk comes next, among given candidates? A chunk's
encoding stands for its row of an embedding matrix that could never be written out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_ms.core.haed import HAEDConfig, hierarchy, initialise
from fairseq_ms.core.hierarchical.chunks import unique_chunks
from fairseq_ms.core.hierarchical.sampled_softmax import SampledSoftmax, sampled_softmax
from fairseq_ms.core.ops.linear import Linear


class ImplicitEmbedding(nn.Module):
    """Segmentation, chunk encoder and main model, whose outputs are compared with the encodings of chunks.

    Args:
        config: the sizes of the model of the second phase.
        projected: compare by a learned projection D -> E instead of equation 4's plain product, for which encodings,
            E wide, are filled up with zeros: the first E entries of an output count.
    """

    def __init__(self, config: HAEDConfig, projected: bool = False) -> None:
        super().__init__()
        self.segmentation, self.encoder, self.main = hierarchy(config)
        self.query = Linear(config.dim, self.encoder.out_dim) if projected else None
        initialise(self, config.init_std)

    def forward(
        self, tokens_BT: Tensor, candidates_AL: Tensor, counts_A: Tensor, log_q_A: Tensor | None = None
    ) -> SampledSoftmax:
        """Score each chunk that is predicted against the candidates.

        Args:
            tokens_BT: tokens, padded on the right, the last target included.
            candidates_AL: the different candidates, padded on the right, those of this batch among them.
            counts_A: how often each of them occurs.
            log_q_A: log probability of drawing each; None for no correction.
        """
        chunks = self.segmentation(tokens_BT)
        # A chunk is encoded once, whether it is read or a candidate or, as most are, both.
        distinct_YL, index, _ = unique_chunks(torch.cat([chunks.tokens_WL, candidates_AL]))
        read_W, candidate_A = index.split([chunks.tokens_WL.shape[0], candidates_AL.shape[0]])
        e_YE = self.encoder.encode(distinct_YL)
        main_WD = self.main(e_YE.index_select(0, read_W), chunks)
        # What the main model says after a chunk is asked for the one behind it; the first of a row nothing predicts.
        predicted_X = (chunks.index_W > 0).nonzero().squeeze(1)
        main_XD = main_WD.index_select(0, predicted_X - 1)
        query_XE = main_XD[:, : self.encoder.out_dim] if self.query is None else self.query(main_XD)
        counts_Y = counts_A.new_zeros(e_YE.shape[0]).index_copy_(0, candidate_A, counts_A)
        log_q_Y = None
        if log_q_A is not None:
            log_q_Y = log_q_A.new_zeros(e_YE.shape[0]).index_copy_(0, candidate_A, log_q_A)
        return sampled_softmax(query_XE, read_W[predicted_X], e_YE, counts_Y, log_q_Y)
