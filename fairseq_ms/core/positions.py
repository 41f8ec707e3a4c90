"""How a model may tell positions apart, and the rules of that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairseq_ms.core.model import ModelConfig

POSITIONS = ("learned", "rotary", "none")


def check_even(config: ModelConfig, head_dim: int) -> None:
    """Raise ValueError for heads that rotary positions cannot turn by pairs of channels."""
    if config.positions == "rotary" and head_dim % 2:
        raise ValueError(f"rotary positions need heads of an even width: got {head_dim}")


def check_positions(config: ModelConfig, offered: bool) -> None:
    """Raise ValueError for positions that do not exist, or that a model with positions of its own does not offer."""
    if config.positions not in POSITIONS:
        raise ValueError(f"positions must be one of {', '.join(POSITIONS)}: got {config.positions}")
    if not offered and config.positions != "learned":
        raise ValueError(f"positions must be left out, since a model with a memory has its own: got {config.positions}")
    check_even(config, config.width_of_head)
    if config.rotary_base <= 1.0:
        raise ValueError(f"rotary_base must be above 1: got {config.rotary_base}")
