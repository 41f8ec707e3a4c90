"""``haed`` and ``hred``: encode chunks, model the sequence of chunks, decode each chunk by itself.

    tokens      </s> | t h e _ | c a t _ | s a t _ ...      chunk 0 is the first token, whatever it is
    encoder       e0      e1        e2
    main          m0      m1        m2                       m(c) has read the chunks 0 .. c
    decoder      the_    cat_      sat_                      m(c) helps to spell chunk c + 1, token by token

Where a chunk ends is a function of its tokens, so this is an autoregressive language model over the tokens like any
other, and its probabilities sum to 1 (Hierarchical Attention Encoder Decoder, 3.1). The decoder reads the token before
the one it predicts, at a chunk's beginning the last one of the chunk before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from fairseq.models import BaseFairseqModel, FairseqIncrementalDecoder, register_model
from torch import Tensor

from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.base import Decoder, LanguageModel
from fairseq_ms.lm.config import fill_in_positions
from fairseq_ms.models.haed.config import (
    HAEDConfig,
    HREDConfig,
    build_hierarchy,
    build_speller,
    in_group,
    initialise,
    validate,
)
from fairseq_ms.modules.hierarchical.chunk_decoder import LSTMDecoder, SpellingState, TransformerDecoder
from fairseq_ms.modules.hierarchical.chunk_main import RecurrentState
from fairseq_ms.modules.hierarchical.chunks import unique_chunks
from fairseq_ms.modules.hierarchical.hierarchy import Hierarchy
from fairseq_ms.modules.hierarchical.rows import RowCaches
from fairseq_ms.modules.hierarchical.sampled_softmax import SampledSoftmax, sampled_softmax
from fairseq_ms.ops.linear import Linear

logger = logging.getLogger(__name__)

Chunks = Callable[[Tensor], Tensor]
IEM_CRITERION = "in_batch_sampled_softmax"


class HierarchicalState(DecodingState):
    """Where every row is: in which chunk, at which place of it, and what main model and decoder remember.

    Attributes:
        main: state of the main model, after the last finished chunk of each row.
        spelling: state of the decoder, within the chunk that follows.
        place_B: how many tokens that chunk has so far; -1 before the first token of all.
        chunk_BL: these tokens, padded.
    """

    def __init__(
        self,
        decoder: HierarchicalDecoder,
        main: RowCaches | RecurrentState,
        spelling: SpellingState,
        chunk_BL: Tensor,
    ) -> None:
        self.decoder = decoder
        self.length = 0
        self.main = main
        self.spelling = spelling
        self.chunk_BL = chunk_BL
        self.place_B = torch.full_like(chunk_BL[:, 0], -1)

    def reorder(self, order: Tensor) -> None:
        self.main.reorder(order)
        self.spelling.reorder(order)
        self.chunk_BL = self.chunk_BL.index_select(0, order)
        self.place_B = self.place_B.index_select(0, order)

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        return self.decoder.features(tokens_BT, self)

    def step(self, tokens_B1: Tensor) -> Tensor:
        return self.decoder.step(tokens_B1, self)


class HierarchicalDecoder(Decoder):
    """fairseq's decoder protocol over a hierarchy and a chunk decoder.

    Args:
        hierarchy: segmentation, chunk encoder and main model.
        speller: the decoder of single chunks.
        positions: greatest number of tokens in a sequence, without the one of ``--add-bos-token``.
        dictionary: the symbols V.
    """

    def __init__(
        self, hierarchy: Hierarchy, speller: LSTMDecoder | TransformerDecoder, positions: int, dictionary: Any
    ) -> None:
        # Not the base's own: it builds the word embedding of a model that reads and predicts at one scale.
        FairseqIncrementalDecoder.__init__(self, dictionary)
        self.hierarchy = hierarchy
        self.speller = speller
        self.positions = positions
        self.adaptive_softmax = None
        self.project = Linear(speller.out_dim, len(dictionary))
        in_group("decoder", self.project)

    def features(self, tokens_BT: Tensor, state: HierarchicalState | None = None) -> Tensor:  # type: ignore[override]
        """Features (B, T, U) of all positions at once, zero at padding; a fresh state is left as after these tokens."""
        # Hypotheses that have finished go on with anything, the padding symbol included; cached, it is a token.
        chunks = self.hierarchy.table(tokens_BT, padded=state is None)
        main_MD = self.hierarchy(chunks, None if state is None else state.main)
        x_BTU = self.speller(tokens_BT, main_MD, chunks, None if state is None else state.spelling)
        if state is not None:
            rows, steps = tokens_BT.shape
            state.length = steps
            state.place_B = chunks.place_P.view(rows, steps)[:, -1]
            place_L = torch.arange(state.chunk_BL.shape[1], device=tokens_BT.device)
            column_BL = steps - state.place_B.unsqueeze(1) + place_L
            inside_BL = column_BL < steps
            chunk_BL = tokens_BT.gather(1, column_BL.clamp(max=steps - 1))
            state.chunk_BL = torch.where(inside_BL, chunk_BL, self.hierarchy.encoder.pad)
        return x_BTU  # type: ignore[no-any-return]

    def step(self, tokens_B1: Tensor, state: HierarchicalState) -> Tensor:
        """Features (B, 1, U) of one more token of every row; rows may begin a new chunk at different steps."""
        token_B, hierarchy = tokens_B1[:, 0], self.hierarchy
        rows_B1 = state.place_B.clamp(min=0).unsqueeze(1)
        state.chunk_BL = state.chunk_BL.scatter(1, rows_B1, tokens_B1)
        ends_B, state.place_B = hierarchy.segmentation.advance(state.place_B, token_B)
        rows_R = ends_B.nonzero().squeeze(1)
        if rows_R.numel():
            everywhere = rows_R.numel() == token_B.numel()
            encoding_RE = hierarchy.encoder.encode(state.chunk_BL[rows_R])
            main_RD = hierarchy.main.step(encoding_RE, None if everywhere else rows_R, state.main)
            self.speller.begin(rows_R, main_RD, state.spelling)
            state.chunk_BL = state.chunk_BL.index_fill(0, rows_R, hierarchy.encoder.pad)
        state.length += 1
        return self.speller.step(token_B, state.spelling).unsqueeze(1)  # type: ignore[no-any-return]

    def new_state(self, batch_size: int, capacity: int) -> HierarchicalState:
        """The state before the first token, with room for about ``capacity`` of them."""
        like, length = next(self.parameters()), self.hierarchy.segmentation.max_length
        fixed = self.hierarchy.segmentation.kind == "fixed"
        # A word has about five characters; the caches of a row with more chunks than that grow.
        chunks = 1 + capacity // (length if fixed else min(length, 4))
        chunk_BL = torch.full((batch_size, length), self.hierarchy.encoder.pad, device=like.device)
        main = self.hierarchy.main.new_state(batch_size, chunks, like)
        return HierarchicalState(self, main, self.speller.new_state(batch_size, like), chunk_BL)


class _TwoPhases:
    """Build the model of the phase that the criterion belongs to."""

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> BaseFairseqModel:
        """fairseq's entry point; raises ``UsageError`` on flags that do not fit together."""
        positions = fill_in_positions(cfg)
        validate(cfg, task)
        dictionary = task.source_dictionary
        hierarchy = build_hierarchy(cfg, dictionary)
        if getattr(cfg.criterion, "_name", cfg.criterion) == IEM_CRITERION:
            model = ImplicitEmbeddingModel(hierarchy, cfg.decoder_embed_dim, positions)
            initialise(model, cfg.init_std)
            return model
        speller = build_speller(cfg, dictionary)
        decoder = HierarchicalDecoder(hierarchy, speller, positions, task.target_dictionary)
        initialise(decoder, cfg.init_std)
        return cls(decoder)  # type: ignore[call-arg]


@register_model("haed", dataclass=HAEDConfig)
class HAED(_TwoPhases, LanguageModel):
    """Hierarchical attention encoder-decoder: MLP encoder, transformer main model, LSTM decoder, unless told otherwise.

    With ``--finetune-from-model``, a checkpoint of the first phase gives it its encoder and main model.
    """

    decoder_class = HierarchicalDecoder

    def upgrade_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Complete a checkpoint of the first phase, in place, with this model's own new decoder."""
        super().upgrade_state_dict(state_dict)
        first_phase = [name for name in state_dict if name.startswith("hierarchy.")]
        if not first_phase:
            return
        for name in first_phase:
            state_dict[f"decoder.{name}"] = state_dict.pop(name)
        dropped = [name for name in state_dict if name.startswith("query.")]
        for name in dropped:
            del state_dict[name]
        new = {name: value for name, value in self.state_dict().items() if name not in state_dict}
        state_dict.update(new)
        logger.info(
            "from the first phase: %s loaded; new: %s; not needed any more: %s",
            _listed([f"decoder.{name}" for name in first_phase]),
            _listed(list(new)),
            _listed(dropped),
        )


@register_model("hred", dataclass=HREDConfig)
class HRED(HAED):
    """Hierarchical recurrent encoder-decoder: LSTMs for encoder, main model and decoder, unless told otherwise."""


class ImplicitEmbeddingModel(BaseFairseqModel):
    """The first phase: encoder and main model, no decoder (Hierarchical Attention Encoder Decoder, 3.2).

    Args:
        hierarchy: segmentation, chunk encoder and main model.
        main_dim: width D of the main outputs.
        positions: greatest number of tokens in a sequence, without the one of ``--add-bos-token``.
    """

    supported_targets = {"future"}

    def __init__(self, hierarchy: Hierarchy, main_dim: int, positions: int) -> None:
        super().__init__()
        self.hierarchy = hierarchy
        self.positions = positions
        self.update = 0
        self.query = Linear(main_dim, hierarchy.encoder.out_dim)
        in_group("main", self.query)

    def forward(self, tokens_BT: Tensor, negatives: Chunks, log_q: Chunks | None = None) -> SampledSoftmax:
        """Score each chunk against the other candidates.

        Args:
            tokens_BT: tokens, padded on the right, the last target included.
            negatives: from the (N, L) chunks of this batch that are predicted to the (K, L) chunks that are
                candidates beside them.
            log_q: from (U, L) different chunks to the (U,) log probability of drawing each; None for no correction.
        """
        chunks = self.hierarchy.table(tokens_BT)
        number_M = chunks.number_M()
        predicted_N = (number_M > 0).nonzero().squeeze(1)
        own_NL = chunks.tokens_ML[predicted_N]
        distinct_UL, which_K, counts_U = unique_chunks(torch.cat([chunks.tokens_ML, own_NL, negatives(own_NL)]))
        encoding_UE = self.hierarchy.encoder.encode(distinct_UL)
        # The batch's own chunks came first and twice: as what the main model reads, which makes them no candidates.
        read = which_K[: number_M.numel()]
        counts_U = counts_U - torch.bincount(read, minlength=counts_U.numel())
        main_MD = self.hierarchy.main(encoding_UE.index_select(0, read), chunks)
        query_NE = self.query(main_MD.index_select(0, predicted_N - 1))
        return sampled_softmax(
            query_NE, read[predicted_N], encoding_UE, counts_U, None if log_q is None else log_q(distinct_UL)
        )

    def set_num_updates(self, num_updates: int) -> None:
        """fairseq's hook before every update; negatives are drawn by its number, so that a resumed run repeats it."""
        super().set_num_updates(num_updates)
        self.update = num_updates

    def prepare_for_inference_(self, cfg: Any) -> None:
        """fairseq's hook before evaluation and generation, neither of which is possible without a decoder."""
        raise UsageError(
            f"--path must be a model with a decoder: this one was trained with --criterion {IEM_CRITERION} and has "
            "none yet (train it end to end with --finetune-from-model)"
        )

    def max_positions(self) -> int:
        """Longest sequence of tokens."""
        return self.positions


def _listed(names: list[str]) -> str:
    """Names of parameters, by the two leading parts of their names, with the number of tensors of each."""
    parts: dict[str, int] = {}
    for name in names:
        part = ".".join(name.removeprefix("decoder.").split(".")[:2])
        parts[part] = parts.get(part, 0) + 1
    return ", ".join(f"{part} ({count} tensors)" for part, count in parts.items()) or "nothing"
