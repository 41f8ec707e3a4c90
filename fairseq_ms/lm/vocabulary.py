"""The flags of adaptive inputs and outputs, which cut the vocabulary into bands."""

from typing import Any

from fairseq_ms.errors import UsageError

# Flags, and the fewest symbols between two cutoffs: a padding symbol is row 1 of the first band.
_CUTOFFS = {"adaptive_input_cutoff": 2, "adaptive_softmax_cutoff": 1}


def parse_cutoffs(name: str, text: str, symbols: int | None = None) -> list[int]:
    """``"20000,40000"`` as [20000, 40000]; UsageError unless they ascend and stay within the number of symbols."""
    numbers = [int(item) if item.strip().isdecimal() else 0 for item in text.split(",")]
    least = _CUTOFFS[name]
    bands = [high - low for low, high in zip([0, *numbers], numbers)]
    if symbols is not None and symbols != numbers[-1]:
        bands.append(symbols - numbers[-1])
    if min(bands) < least:
        flag, end = f"--{name.replace('_', '-')}", "" if symbols is None else f" up to the dictionary's {symbols}"
        raise UsageError(f"{flag} must be ascending and cut off bands of at least {least} symbols{end}: got {text!r}")
    return numbers


def enough_symbols(cfg: Any, least: int) -> int:
    """How many symbols a dictionary needs for a model's adaptive cutoffs with a band behind the last, or ``least``."""
    texts = {name: getattr(cfg, name, None) for name in _CUTOFFS}
    return max([least, *(parse_cutoffs(name, text)[-1] + _CUTOFFS[name] for name, text in texts.items() if text)])


def validate_cutoffs(cfg: Any, symbols: int) -> None:
    """Raise ``UsageError`` on adaptive cutoffs that are no ascending numbers or exceed the number of symbols."""
    for name in _CUTOFFS:
        if getattr(cfg, name, None):
            parse_cutoffs(name, getattr(cfg, name), symbols)
