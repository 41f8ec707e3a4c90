"""A language model over k-grams that predicts the next one's bag of words (Multi-scale Transformer LMs, Section 6.2).

The k-grams are right-aligned blocks (``pooling.py``): block i ends with position ik and predicts the k tokens after it,
targets ik .. (i+1)k-1, each with the same distribution. So it is also a normalised language model of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_ms.core.config import ModelConfig
from fairseq_ms.core.joining import Coarser
from fairseq_ms.core.model import LanguageModel
from fairseq_ms.core.scales import Scale, check_layers
from fairseq_ms.core.topdown import TopDownScale, TopDownState


@dataclass(frozen=True, kw_only=True)
class CoarseLMConfig(ModelConfig):
    """Sizes of a ``CoarseLM``.

    Attributes:
        scale: k and the number of layers
        downsampler: "avg", "max" or "conv"
    """

    scale: Scale = Scale(4, 12)  # noqa: RUF009 (it is frozen)
    downsampler: str = "avg"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers([self.scale], finest=False)


class CoarseLM(LanguageModel[TopDownState]):
    """Layers over k-grams; every position has the output of the newest finished k-gram."""

    def __init__(self, config: CoarseLMConfig) -> None:
        super().__init__(config)
        self.factor = config.scale.factor
        self.scale = TopDownScale(config.scale, None, config, config.downsampler)
        self.reset_parameters()

    def block_features(self, tokens_BT: Tensor) -> Tensor:
        """Features (B, ceil(T / k), D) of the blocks; block i predicts targets ik .. (i+1)k-1."""
        return self.scale(self.embed(tokens_BT), None)

    def features(self, tokens_BT: Tensor, state: TopDownState | None = None) -> Tensor:
        if state is None:
            blocks = Coarser(self.block_features(tokens_BT))
        else:
            x_BTD = self.embed(tokens_BT, state.position)
            blocks = state.coarser(self.factor, self.scale(x_BTD, None, state), 1)
            state.remember(x_BTD)
        x_BTD = blocks.x_BCD.repeat_interleave(self.factor, dim=1)
        return x_BTD[:, blocks.offset : blocks.offset + tokens_BT.size(1)]

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """The features of right-aligned blocks, (B, ceil(T / k), D), by the scale k."""
        return {self.factor: self.block_features(tokens_BT)}

    def new_state(self, batch_size: int, capacity: int = 0, device: torch.device | None = None) -> TopDownState:
        self.check_batch_size(batch_size)
        return TopDownState([self.scale], batch_size, self.room(capacity), self.embed.like(device))
