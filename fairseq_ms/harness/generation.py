"""Continuing texts until they contain a stop string, greedily or by sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_ms.errors import UsageError
from fairseq_ms.tools.checkpoints import Checkpoint

# What the harness generates where a task does not say how much.
_DEFAULT_TOKENS = 256
# What changes nothing, and some tasks say.
_IDLE = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "length_penalty": 1, "min_p": 0}
_IDLE |= {"no_repeat_ngram_size": 0, "typical_p": 1, "top_k": -1, "use_cache": True}
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class Settings:
    """How a task wants its texts continued.

    Attributes:
        until: strings that end a continuation and are cut off
        tokens: the most tokens of a continuation
        temperature: divides the logits; below 1e-6 it is greedy search
        top_k: sampling is among as many of the most probable tokens; 0 for all
        top_p: and among as few as have this probability together
    """

    until: tuple[str, ...]
    tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def settings(given: Mapping[str, Any], room: int | None) -> Settings:
    """The harness's ``generation_kwargs`` for a model that reads ``room`` tokens, or any number if None.

    Raises UsageError for settings that would have no effect here and for lengths that the model has no room for.
    """
    left = {name: value for name, value in given.items() if value is not None and _IDLE.get(name, ...) != value}
    until = left.pop("until", [])
    lengths = [int(left.pop(name)) for name in _LENGTHS if name in left]
    # Half of what the model can read is left to the prompt.
    default = _DEFAULT_TOKENS if room is None else min(_DEFAULT_TOKENS, room // 2)
    tokens = lengths[0] if lengths else default
    if tokens < 1 or (room is not None and tokens >= room):
        most = "" if room is None else f" and below the {room} tokens that the model reads"
        raise UsageError(f"max_gen_toks must be at least 1{most}: got {tokens}")
    temperature = float(left.pop("temperature", 0.0))
    sampled = bool(left.pop("do_sample", temperature > 0.0))
    top_k, top_p = int(left.pop("top_k", 0)), float(left.pop("top_p", 1.0))
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        rule = "temperature and top_k must be at least 0, and top_p above 0 and at most 1"
        raise UsageError(f"{rule}: got {temperature}, {top_k} and {top_p}")
    if left:
        known = "until, max_gen_toks, do_sample, temperature, top_k and top_p"
        raise UsageError(f"generation_kwargs must be among {known}: got {min(left)}")
    stops = (until,) if isinstance(until, str) else tuple(until)
    if not sampled:
        return Settings(stops, tokens)
    return Settings(stops, tokens, temperature or 1.0, top_k, top_p)


def cut(text: str, until: Sequence[str]) -> str:
    """The text in front of the first stop string."""
    return min((text.partition(stop)[0] for stop in until if stop), key=len, default=text)


def continued(
    checkpoint: Checkpoint,
    prompts_BT: Tensor,
    asked: Settings,
    text_of: Callable[[list[int]], str],
    never: Sequence[int] = (),
) -> list[str]:
    """The continuations of prompts of equal length, each cut in front of its stop string.

    The end of a line is a token like any other, so that a continuation can have several lines. ``text_of`` is the
    text of tokens, of which those in ``never`` are not written. Raises ValueError, at the end, for logits that were not
    finite.
    """
    core, words = checkpoint.model.decoder.core, checkpoint.dictionary
    rows: list[list[int]] = [[] for _ in prompts_BT]
    texts: dict[int, str] = {}
    sizes = core.config.to_dict()
    predicted = sizes.get("output_vocab_size") or sizes["vocab_size"]
    allowed = torch.ones(predicted, dtype=torch.bool, device=checkpoint.device)
    # They stand in no text.
    allowed[[words.pad(), words.bos(), *never]] = False

    def all_stop(tokens_B1: Tensor) -> bool:
        for row, token in enumerate(tokens_B1.flatten().tolist()):
            if row not in texts:
                rows[row].append(token)
                text = text_of(rows[row])
                shortened = cut(text, asked.until)
                if len(rows[row]) == asked.tokens or shortened != text:
                    texts[row] = shortened
        return len(texts) == len(rows)

    settings = asked.tokens, asked.temperature, asked.top_k, asked.top_p
    core.generate(prompts_BT.to(checkpoint.device), *settings, allowed=allowed, stop=all_stop)
    return [texts[row] for row in range(len(rows))]
