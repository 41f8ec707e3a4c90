"""Texts that continue prompts, token by token, and how the next token is drawn from logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fairseq_ms.core.cache import State
from fairseq_ms.core.model import CausalModel, Prompts
from fairseq_ms.core.steps.replay import Reader

# Below it, dividing by a temperature leaves nothing to draw: it is as far as logits of ten are apart in float32.
_GREEDY = 1e-6


@torch.no_grad()
def generate(
    model: CausalModel,
    prompt: Prompts,
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
) -> Prompts:
    """As ``CausalModel.generate``."""
    check_sampling(prompt, n, temperature, top_k, top_p)
    if state is not None and isinstance(prompt, list):
        raise ValueError("state must be left out with a list of prompts, which begin texts: got both")
    rows = prompt if isinstance(prompt, list) else [prompt] if prompt.dim() == 1 else list(prompt)
    counts = [row.numel() for row in rows]
    prompts_BP = model.checked_tokens(nn.utils.rnn.pad_sequence(rows, batch_first=True))
    lengths_B1 = torch.tensor(counts, device=prompts_BP.device).unsqueeze(1)
    if eos_idx is not None and not 0 <= eos_idx < model.config.vocab_size:
        raise ValueError(f"eos_idx must be a symbol, 0 to {model.config.vocab_size - 1}: got {eos_idx}")
    shortest, length = min(counts), max(counts) + n
    texts, ended_B1 = [prompts_BP[:, :shortest]], torch.zeros_like(lengths_B1, dtype=torch.bool)
    model.check_length(length - 1 + (state.length if state is not None else 0))
    finite: Tensor | bool = True
    is_ours = state is None
    if state is not None:
        model.check_state(state, texts[0])
    # Without dropout meanwhile; each part as it was afterwards.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        state = model.known(state) if state is not None else model.new_state(texts[0].size(0), length)
        read = Reader(model, state, graphs, state.length + length - 1)
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
        if not is_ours:
            read.settle()
    finally:
        for module, training in modes:
            module.training = training
    check_finite(finite)
    whole = torch.cat(texts, dim=1)
    if isinstance(prompt, list):
        return [row[: count + n] for row, count in zip(whole, counts)]
    return whole[0] if prompt.dim() == 1 else whole


def check_sampling(prompt: Tensor | list[Tensor], n: int, temperature: float, top_k: int, top_p: float) -> None:
    """Raise ValueError for a prompt without tokens, a list of none, and for numbers outside their ranges."""
    shapes = [tuple(row.shape) for row in prompt] if isinstance(prompt, list) else [tuple(prompt.shape)]
    known = (1,) if isinstance(prompt, list) else (1, 2)
    if not shapes or not all(len(shape) in known and math.prod(shape) for shape in shapes):
        wanted = "prompt must be (T,) or (B, T), or a list of (T,), with at least one token"
        raise ValueError(f"{wanted}: got {'a list of ' if known == (1,) else ''}shape {', '.join(map(str, shapes))}")
    for name, count, least in (("n", n, 1), ("top_k", top_k, 0)):
        if count < least or count % 1:
            raise ValueError(f"{name} must be a whole number of at least {least}: got {count}")
    if not temperature >= 0.0:
        raise ValueError(f"temperature must be at least 0: got {temperature}")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be above 0 and at most 1: got {top_p}")


def check_finite(finite: Tensor | bool) -> None:
    """Raise ValueError unless the logits of a text were finite; a GPU is waited for.

    Nothing can be drawn from others: the first of all symbols would come out of them.
    """
    if not finite:
        wrong = "the model's weights are not, or its numbers are too large for its type"
        raise ValueError(f"logits must be finite: got NaN or infinity, since {wrong}")


def draw(logits_BV: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None) -> Tensor:
    """One token a row, (B, V) -> (B, 1), drawn as ``CausalModel.generate`` says."""
    if temperature < _GREEDY:
        return logits_BV.argmax(-1, keepdim=True)
    probs_BV = (logits_BV.float() / temperature).softmax(-1)
    if top_k:
        most = probs_BV.topk(min(top_k, probs_BV.size(-1)))
        probs_BV = torch.zeros_like(probs_BV).scatter_(1, most.indices, most.values)
    if top_p < 1.0:
        sorted_BV, order_BV = (probs_BV / probs_BV.sum(-1, keepdim=True)).sort(-1, descending=True)
        # A token counts if those before it do not yet have the probability.
        sorted_BV = sorted_BV.masked_fill(sorted_BV.cumsum(-1) - sorted_BV >= top_p, 0.0)
        probs_BV = torch.zeros_like(probs_BV).scatter_(1, order_BV, sorted_BV)
    # As ``torch.multinomial`` draws, which waits to see that probabilities are none below zero.
    return (probs_BV / torch.empty_like(probs_BV).exponential_(generator=generator)).argmax(-1, keepdim=True)
