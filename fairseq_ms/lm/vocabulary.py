"""The flags of adaptive inputs and outputs, which cut the vocabulary into bands."""

from typing import Any

from fairseq_ms.errors import UsageError


def parse_cutoffs(flag: str, text: str | None) -> tuple[int, ...]:
    """``"20000,40000"`` as (20000, 40000); UsageError unless they are whole numbers."""
    items = [item.strip() for item in (text or "").split(",")]
    if not all(item.isdecimal() for item in items):
        raise UsageError(f"{flag} must be a comma separated list of ascending whole numbers: got {text or 'none'}")
    return tuple(map(int, items))


def enough_symbols(cfg: Any, least: int, beyond: int = 2) -> int:
    """The least size of a dictionary with ``beyond`` symbols after the last adaptive cutoff, and at least ``least``."""
    names = [name for name in ("adaptive_input_cutoff", "adaptive_softmax_cutoff") if getattr(cfg, name, None)]
    found = [parse_cutoffs("--" + name.replace("_", "-"), getattr(cfg, name)) for name in names]
    return max([least, *(max(cutoffs) + beyond for cutoffs in found)])
