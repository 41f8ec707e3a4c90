"""``haed`` and ``hred``: encode chunks, model the sequence of chunks, decode each chunk by itself.

    tokens      </s> | t h e _ | c a t _ | s a t _ ...      chunk 0 is the first token, whatever it is
    encoder       e0      e1        e2                      equation 1
    main          m0      m1        m2                      equation 2: m(c) has read the chunks 0 .. c
    decoder      the_    cat_      sat_                     equation 3: m(c) helps to predict chunk c + 1

Where a chunk ends is a function of its tokens, so this is an autoregressive language model over the tokens like any
other, and its probabilities sum to 1 (HAED, Section 3.1). The decoder reads the token before the one it predicts, at a
chunk's beginning the last one of the chunk before.
"""

from __future__ import annotations

import logging

from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel, register_model
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_ms.core.hierarchical.chunk_decoder import LSTMDecoder, TransformerDecoder
from fairseq_ms.core.ops.linear import Linear
from fairseq_ms.decoding.hierarchical import HierarchicalState
from fairseq_ms.lm.base import BaseDecoder, LanguageModel
from fairseq_ms.lm.config import fill_in_positions
from fairseq_ms.models.haed.build import Hierarchy, build_chunk_decoder, build_hierarchy, in_group, initialise
from fairseq_ms.models.haed.config import HAEDConfig, HREDConfig, is_first_phase, refuse_idle, validate
from fairseq_ms.models.haed.iem import build_first_phase, from_first_phase

logger = logging.getLogger(__name__)


class HierarchicalDecoder(BaseDecoder):
    """Chunk encoder, main model and chunk decoder.

    Args:
        hierarchy: segmentation, chunk encoder and main model.
        chunk_decoder: the model over the tokens of one chunk.
        positions: greatest number of tokens in a sequence, without the one of ``--add-bos-token``.
        dictionary: the symbols V.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        chunk_decoder: LSTMDecoder | TransformerDecoder,
        positions: int,
        dictionary: Dictionary,
    ) -> None:
        super().__init__(dictionary, positions)
        self.segmentation, self.encoder, self.main = hierarchy
        self.chunk_decoder = chunk_decoder
        self.project = Linear(chunk_decoder.out_dim, len(dictionary))
        in_group("decoder", self.project)

    @classmethod
    def build(
        cls, cfg: HAEDConfig, source_dictionary: Dictionary, target_dictionary: Dictionary
    ) -> HierarchicalDecoder:
        hierarchy = build_hierarchy(cfg, source_dictionary)
        chunk_decoder = build_chunk_decoder(cfg, source_dictionary)
        return cls(hierarchy, chunk_decoder, fill_in_positions(cfg), target_dictionary)

    def features(self, tokens_BT: Tensor) -> Tensor:
        """Features (B, T, U) of all positions at once, zero at padding (HAED, Section 3.1)."""
        chunks = self.segmentation(tokens_BT)
        e_ME = self.encoder(chunks.tokens_ML)  # equation 1: each chunk by itself
        m_MD = self.main(e_ME, chunks)  # equation 2: the chunks up to each
        return self.chunk_decoder(tokens_BT, m_MD, chunks)  # equation 3: the tokens of the next chunk

    def new_state(self, batch_size: int, capacity: int) -> HierarchicalState:
        return HierarchicalState(self.segmentation, self.encoder, self.main, self.chunk_decoder, batch_size, capacity)


@register_model("haed", dataclass=HAEDConfig)
class HAED(LanguageModel):
    """Hierarchical attention encoder-decoder: MLP encoder, transformer main model, LSTM decoder, unless told otherwise.

    With ``--finetune-from-model``, a checkpoint of the first phase gives it its encoder and main model.
    """

    @classmethod
    def build_model(cls, cfg: HAEDConfig, task: FairseqTask) -> BaseFairseqModel:
        """The model of the phase that the criterion trains.

        That is this class, with an encoder, a main model and a decoder, unless the criterion is that of the implicit
        embedding matrix: then it is an ``ImplicitEmbeddingModel``, which has no decoder and is no language model.
        Raises ``UsageError`` on flags that do not fit together.
        """
        positions = fill_in_positions(cfg)
        validate(cfg, task)
        if not getattr(task, "from_checkpoint", False):
            refuse_idle(cfg)
        if is_first_phase(cfg):
            return build_first_phase(cfg, task.source_dictionary, positions)
        decoder = HierarchicalDecoder.build(cfg, task.source_dictionary, task.target_dictionary)
        initialise(decoder, cfg.init_std)
        return cls(decoder)

    def upgrade_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Complete a checkpoint of the first phase, in place, with this model's own new decoder."""
        super().upgrade_state_dict(state_dict)
        loaded, new, dropped = from_first_phase(state_dict, self.state_dict())
        if loaded:
            logger.info(
                "from the first phase: %s loaded; new: %s; not needed any more: %s",
                *(_listed(names) for names in (loaded, new, dropped)),
            )


@register_model("hred", dataclass=HREDConfig)
class HRED(HAED):
    """Hierarchical recurrent encoder-decoder: LSTMs for encoder, main model and decoder, unless told otherwise."""


def _listed(names: list[str]) -> str:
    """Names of parameters, by the leading parts of their names, with the number of tensors of each."""
    parts: dict[str, int] = {}
    for name in names:
        first, second, *_ = name.removeprefix("decoder.").split(".")
        part = first if first in ("encoder", "main") else f"{first}.{second}"
        parts[part] = parts.get(part, 0) + 1
    return ", ".join(f"{part} ({count} tensors)" for part, count in parts.items()) or "nothing"
