"""What is refused in one sentence: numbers of a configuration, and tokens and targets of a text."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

# Whole numbers of a configuration; all others are at least 1.
_OF_MEMORIES = ("mem_len", "compressed_mem_len", "output_layers")
MAY_BE_ZERO = ("padding_idx", "max_positions", "position_dim", "short_conv", *_OF_MEMORIES)


def check_sizes(config: Any) -> None:
    """Raise ValueError for a whole number of a dataclass that is too small; its lists become tuples."""
    for field in fields(config):
        value, least = getattr(config, field.name), int(field.name not in MAY_BE_ZERO)
        if isinstance(value, list):
            object.__setattr__(config, field.name, tuple(value))
        elif str(field.type).startswith("int") and value is not None and value < least:
            raise ValueError(f"{field.name} must be at least {least}: got {value}")


def check_probability(name: str, value: float) -> None:
    """Raise ValueError unless it is at least 0 and below 1."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1: got {value}")


def checked_tokens(tokens_BT: Tensor) -> Tensor:
    """Tokens (B, T) as int64; ValueError unless they are integers, at least one of them."""
    if tokens_BT.dim() != 2 or not tokens_BT.numel():
        raise ValueError(f"tokens must be (B, T) with at least one token: got shape {tuple(tokens_BT.shape)}")
    return _integers("tokens", tokens_BT)


def checked_targets(targets_BT: Tensor, tokens_BT: Tensor) -> Tensor:
    """Targets as int64; ValueError unless they are integers of the tokens' shape."""
    if targets_BT.shape != tokens_BT.shape:
        raise ValueError(f"targets must have the shape of tokens {(*tokens_BT.shape,)}: got {(*targets_BT.shape,)}")
    return _integers("targets", targets_BT)


def _integers(name: str, x: Tensor) -> Tensor:
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{name} must be integers: got {x.dtype}")
    return x.long()
