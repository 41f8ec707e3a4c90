"""The papers' baseline, a transformer with full causal attention (Multi-scale Transformer LMs, Section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_ms.core.cache import KeyValueCache, State
from fairseq_ms.core.config import ModelConfig
from fairseq_ms.core.layers import TransformerStack
from fairseq_ms.core.model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class VanillaConfig(ModelConfig):
    """Sizes of a ``Vanilla``.

    Attributes:
        layers: number of layers
    """

    layers: int = 12


class VanillaState(State):
    """A KV cache for each layer."""

    def __init__(self, config: VanillaConfig, batch_size: int, caches: list[KeyValueCache]) -> None:
        super().__init__(config, batch_size)
        self.caches = caches

    def parts(self) -> Iterable[KeyValueCache]:
        return self.caches

    def truncate(self, length: int) -> None:
        for cache in self.caches:
            cache.truncate(length)
        self.length = length


class Vanilla(LanguageModel[VanillaState]):
    """A stack of layers with full causal attention."""

    def __init__(self, config: VanillaConfig) -> None:
        super().__init__(config)
        self.stack = TransformerStack(config, config.layers)
        self.reset_parameters()

    def features(self, tokens_BT: Tensor, state: VanillaState | None = None) -> Tensor:
        start = state.position if state is not None else 0
        x_BTD = self.embed(tokens_BT, start)
        rotation_2TF = self.config.rotation_after(start, tokens_BT.size(1), x_BTD)
        x_BTD = self.stack(x_BTD, state.caches if state is not None else None, rotation_2TF)
        if state is not None:
            state.move_on(tokens_BT.size(1))
        return x_BTD

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """The features of all positions, (B, T, D), by the scale 1."""
        return {1: self.features(tokens_BT)}

    def new_state(self, batch_size: int, capacity: int = 0, device: torch.device | None = None) -> VanillaState:
        self.check_batch_size(batch_size)
        caches = self.stack.new_caches(batch_size, self.room(capacity), self.embed.like(device))
        return VanillaState(self.config, batch_size, caches)
