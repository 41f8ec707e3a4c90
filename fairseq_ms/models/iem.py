"""The first phase of ``haed`` and ``hred`` in fairseq: encoder and main model, trained without a decoder."""

from __future__ import annotations

from typing import ClassVar

from fairseq.models import BaseFairseqModel

from fairseq_ms import core
from fairseq_ms.core.hierarchical.iem import ImplicitEmbedding
from fairseq_ms.errors import UsageError

IEM_CRITERION = "in_batch_sampled_softmax"
"""The criterion of the first phase."""


class ImplicitEmbeddingModel(ImplicitEmbedding, BaseFairseqModel):
    """fairseq's model of the first phase: it has no decoder and is no language model.

    Args:
        config: the sizes of the model of the second phase.
        projected: as for ``core.hierarchical.iem.ImplicitEmbedding``.
        positions: greatest number of tokens in a sequence, without the one of ``--add-bos-token``.
    """

    supported_targets: ClassVar[set[str]] = {"future"}

    def __init__(self, config: core.HAEDConfig, projected: bool, positions: int) -> None:
        super().__init__(config, projected)
        self.positions = positions
        self.update = 0

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
