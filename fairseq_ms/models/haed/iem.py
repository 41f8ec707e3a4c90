"""The first phase of ``haed`` and ``hred``: the implicit embedding matrix (HAED, Section 3.2, equations 4 and 5).

Encoder and main model are trained without a decoder: which chunk comes next, among candidates that the criterion hands
over? A chunk's encoding stands for its row of an embedding matrix that could never be written out.
"""

from __future__ import annotations

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from torch import Tensor

from fairseq_ms.core.hierarchical.chunk_encoder import unique_chunks
from fairseq_ms.core.hierarchical.sampled_softmax import SampledSoftmax, sampled_softmax
from fairseq_ms.core.ops.linear import Linear
from fairseq_ms.errors import UsageError
from fairseq_ms.models.haed.build import Hierarchy, build_hierarchy, in_group, initialise
from fairseq_ms.models.haed.config import IEM_CRITERION, HAEDConfig


class ImplicitEmbeddingModel(BaseFairseqModel):
    """Segmentation, chunk encoder and main model, whose outputs are compared with the encodings of chunks.

    Args:
        hierarchy: segmentation, chunk encoder and main model.
        main_dim: width D of the main outputs.
        positions: greatest number of tokens in a sequence, without the one of ``--add-bos-token``.
        projected: compare by a learned projection D -> E instead of equation 4's plain product, for which encodings,
            E wide, are filled up with zeros: the first E entries of an output count.
    """

    supported_targets = {"future"}

    def __init__(self, hierarchy: Hierarchy, main_dim: int, positions: int, projected: bool) -> None:
        super().__init__()
        self.segmentation, self.encoder, self.main = hierarchy
        self.positions = positions
        self.update = 0
        self.query = Linear(main_dim, self.encoder.out_dim) if projected else None
        if self.query is not None:
            in_group("main", self.query)

    def forward(
        self, tokens_BT: Tensor, candidates_KL: Tensor, counts_K: Tensor, log_q_K: Tensor | None = None
    ) -> SampledSoftmax:
        """Score each chunk that is predicted against the candidates.

        Args:
            tokens_BT: tokens, padded on the right, the last target included.
            candidates_KL: the different candidates, padded on the right, those of this batch among them.
            counts_K: how often each of them occurs.
            log_q_K: log probability of drawing each; None for no correction.
        """
        chunks = self.segmentation(tokens_BT)
        # A chunk is encoded once, whether it is read or a candidate or, as most are, both.
        distinct_UL, index, _ = unique_chunks(torch.cat([chunks.tokens_ML, candidates_KL]))
        read_M, candidate_K = index.split([chunks.tokens_ML.shape[0], candidates_KL.shape[0]])
        e_UE = self.encoder.encode(distinct_UL)
        main_MD = self.main(e_UE.index_select(0, read_M), chunks)
        # What the main model says after a chunk is asked for the one behind it; the first of a row nothing predicts.
        predicted_N = (chunks.index_M() > 0).nonzero().squeeze(1)
        main_ND = main_MD.index_select(0, predicted_N - 1)
        query_NE = main_ND[:, : self.encoder.out_dim] if self.query is None else self.query(main_ND)
        counts_U = counts_K.new_zeros(e_UE.shape[0]).index_copy_(0, candidate_K, counts_K)
        log_q_U = None
        if log_q_K is not None:
            log_q_U = log_q_K.new_zeros(e_UE.shape[0]).index_copy_(0, candidate_K, log_q_K)
        return sampled_softmax(query_NE, read_M[predicted_N], e_UE, counts_U, log_q_U)

    def set_num_updates(self, num_updates: int) -> None:
        """fairseq's hook before every update; negatives are drawn by it, so that a resumed run repeats them."""
        super().set_num_updates(num_updates)
        self.update = num_updates

    def prepare_for_inference_(self, cfg: object) -> None:
        """fairseq's hook before evaluation and generation, neither of which is possible without a decoder."""
        raise UsageError(
            f"--path must be a model with a decoder: this one was trained with --criterion {IEM_CRITERION} and has "
            "none yet (train it end to end with --finetune-from-model)"
        )

    def max_positions(self) -> int:
        """Longest sequence of tokens."""
        return self.positions


def build_first_phase(cfg: HAEDConfig, dictionary: Dictionary, positions: int) -> ImplicitEmbeddingModel:
    """The model of the first phase, of validated flags."""
    projected = str(cfg.query) == "linear"
    model = ImplicitEmbeddingModel(build_hierarchy(cfg, dictionary), cfg.decoder_embed_dim, positions, projected)
    initialise(model, cfg.init_std)
    return model


def from_first_phase(state_dict: dict[str, Tensor], new: dict[str, Tensor]) -> tuple[list[str], list[str], list[str]]:
    """Complete a checkpoint of the first phase, in place, to one of ``haed``, with the parameters of a ``new`` one.

    Returns:
        the names of what it has, of what was new and of what is not needed any more; all empty for other checkpoints.
    """
    # A language model has all its parameters in fairseq's decoder.
    if not any(name.startswith("encoder.") for name in state_dict):
        return [], [], []
    dropped = [name for name in state_dict if name.startswith("query.")]
    loaded = [name for name in state_dict if name not in dropped]
    for name in loaded:
        state_dict[f"decoder.{name}"] = state_dict.pop(name)
    for name in dropped:
        del state_dict[name]
    missing = [name for name in new if name not in state_dict]
    state_dict.update({name: new[name] for name in missing})
    return loaded, missing, dropped
