"""Sampling: draw the next token from logits by temperature, top-k and top-p."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Lower temperatures count as 0: divided by them, float32 logits of about ten differ by whole units or are infinite.
_GREEDY = 1e-6


def check_sampling(prompt: Tensor | list[Tensor], n: int, temperature: float, top_k: int, top_p: float) -> None:
    """Raise ValueError for a prompt without tokens, an empty list, and settings outside their ranges."""
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


def check_allowed(allowed: Tensor, symbols: int) -> None:
    """Raise ValueError unless a mask (V,) of the predicted symbols allows at least one."""
    if allowed.shape != (symbols,) or allowed.dtype != torch.bool:
        got = f"{allowed.dtype} of shape {tuple(allowed.shape)}"
        raise ValueError(f"allowed must be bool of shape ({symbols},), the symbols that are predicted: got {got}")
    if not bool(allowed.any()):
        raise ValueError("allowed must be True for at least one symbol: got none")


def check_finite(finite: Tensor | bool) -> None:
    """Raise ValueError if some logits of a text were not finite: only symbol 0 would have been drawn.

    Waits for the GPU, and so is called once, at the end of a text.
    """
    if not finite:
        wrong = "the model's weights are not, or its numbers are too large for its type"
        raise ValueError(f"logits must be finite: got NaN or infinity, since {wrong}")


def draw(logits_BV: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Draw one token a row, (B, V) -> (B, 1), with settings as in ``CausalModel.generate``."""
    if temperature < _GREEDY:
        return logits_BV.argmax(-1, keepdim=True)
    probs_BV = (logits_BV.float() / temperature).softmax(-1)
    if top_k:
        most = probs_BV.topk(min(top_k, probs_BV.size(-1)))
        probs_BV = torch.zeros_like(probs_BV).scatter_(1, most.indices, most.values)
    if top_p < 1.0:
        sorted_BV, order_BV = (probs_BV / probs_BV.sum(-1, keepdim=True)).sort(-1, descending=True)
        # A token stays if the more probable ones add up to less than top_p.
        sorted_BV = sorted_BV.masked_fill(sorted_BV.cumsum(-1) - sorted_BV >= top_p, 0.0)
        probs_BV = torch.zeros_like(probs_BV).scatter_(1, order_BV, sorted_BV)
    # This is how ``torch.multinomial`` draws, without its check for negative probabilities, which waits for the GPU.
    return (probs_BV / torch.empty_like(probs_BV).exponential_(generator=generator)).argmax(-1, keepdim=True)
