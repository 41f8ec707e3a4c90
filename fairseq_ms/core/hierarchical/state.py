"""What a HAED knows of its texts between two tokens."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fairseq_ms.core.cache import Reorderable, State
from fairseq_ms.core.hierarchical.caches import ChunkCaches, RowCaches
from fairseq_ms.core.hierarchical.chunks import Unfinished
from fairseq_ms.core.hierarchical.config import HAEDConfig
from fairseq_ms.core.ops.lstm import LSTMState


class HAEDState(State):
    """What main model and chunk decoder know of every row, and the chunk that it is in."""

    def __init__(
        self,
        config: HAEDConfig,
        main: RowCaches | LSTMState,
        decoder: LSTMState | ChunkCaches,
        unfinished: Unfinished,
    ) -> None:
        super().__init__(config, unfinished.place_B.numel())
        self.main, self.decoder, self.unfinished = main, decoder, unfinished

    def parts(self) -> Iterable[Reorderable]:
        return self.main, self.decoder, self.unfinished

    def move_on(self, count: int, ended_B: Tensor | None = None) -> None:
        """Count tokens that have been read; with them, chunks of some rows may have ended."""
        super().move_on(count)
