"""Generation of text, token by token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_ms.core.cache import State
from fairseq_ms.core.model import CausalModel
from fairseq_ms.core.sampling import check_allowed, check_finite, check_sampling, draw
from fairseq_ms.core.steps.replay import Reader

# For each module in use by ``_evaluating``, how many blocks use it, and its mode before the first of them.
_evaluated: dict[nn.Module, tuple[int, bool]] = {}
_evaluated_lock = threading.Lock()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside the block, and each module back into its own mode at the end.

    Several threads may be inside at a time: modes change when the first enters and the last leaves.
    """
    modules = list(model.modules())
    with _evaluated_lock:
        for module in modules:
            count, training = _evaluated.get(module, (0, module.training))
            _evaluated[module] = count + 1, training
        model.eval()
    try:
        yield
    finally:
        with _evaluated_lock:
            for module in modules:
                count, training = _evaluated.pop(module)
                if count > 1:
                    _evaluated[module] = count - 1, training
                else:
                    module.training = training


@torch.no_grad()
def generate(
    model: Any,
    prompt: Any,
    n: int,
    temperature: float,
    top_k: int,
    top_p: float,
    state: State | None,
    generator: torch.Generator | None,
    graphs: bool | None,
    eos_idx: int | None,
    allowed: Tensor | None,
    stop: Callable[[Tensor], bool] | None,
) -> Any:
    """``CausalModel.generate`` of a model, whose docstring says what the arguments are."""
    check_sampling(prompt, n, temperature, top_k, top_p)
    if state is not None and isinstance(prompt, list):
        raise ValueError("state must be left out with a list of prompts, which begin texts: got both")
    rows = prompt if isinstance(prompt, list) else [prompt] if prompt.dim() == 1 else list(prompt)
    counts = [row.numel() for row in rows]
    prompts_BP = model.checked_tokens(nn.utils.rnn.pad_sequence(rows, batch_first=True))
    lengths_B1 = torch.tensor(counts, device=prompts_BP.device).unsqueeze(1)
    if eos_idx is not None and not 0 <= eos_idx < model.config.vocab_size:
        raise ValueError(f"eos_idx must be a symbol, 0 to {model.config.vocab_size - 1}: got {eos_idx}")
    if allowed is not None:
        check_allowed(allowed, getattr(model.config, "output_vocab_size", None) or model.config.vocab_size)
    shortest, length = min(counts), max(counts) + n
    texts, ended_B1 = [prompts_BP[:, :shortest]], torch.zeros_like(lengths_B1, dtype=torch.bool)
    if state is not None:
        model.check_state(state, texts[0])
    model.check_length(length - 1 + (state.length if state is not None else 0))
    finite: Tensor | bool = True
    with _evaluating(model):
        growing = model.new_state(len(rows), length, prompts_BP.device) if state is None else model.settled(state)
        read = Reader(model, growing, graphs, growing.length + length - 1)
        for place in range(shortest, length):
            logits_BV = model.logits(read(texts[-1])[:, -1:])[:, -1]
            finite = logits_BV.isfinite().all() & finite
            if allowed is not None:
                logits_BV = logits_BV.masked_fill(~allowed, -torch.inf)
            next_B1 = draw(logits_BV, temperature, top_k, top_p, generator)
            if eos_idx is not None:
                next_B1 = next_B1.masked_fill(ended_B1, eos_idx)
                ended_B1 = (next_B1 == eos_idx) & (place >= lengths_B1)
            if place < max(counts):
                next_B1 = next_B1.where(place >= lengths_B1, prompts_BP[:, place, None])
            texts.append(next_B1)
            if eos_idx is not None and bool(ended_B1.all()):
                break
            if stop is not None and stop(next_B1):
                break
        if state is not None:
            read.settle()
    check_finite(finite)
    whole = torch.cat(texts, dim=1)
    if isinstance(prompt, list):
        # Longer prompts are whole also where ``stop`` ended them all.
        return [torch.cat([row, text[len(row) : len(row) + n]]) for row, text in zip(rows, whole)]
    return whole[0] if prompt.dim() == 1 else whole


CausalModel.generation = generate
