"""The multi-scale models written down position by position, on the weights of the fast ones.

Nothing is cached, batched over blocks or recomputed: each block is a list of positions, each query a list of
the keys it may see.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x) ** 2,
    "swish": F.silu,
    "swiglu": lambda x: F.silu(x[: len(x) // 2]) * x[len(x) // 2 :],
}


def normalised(x_D: Tensor, norm: Any) -> Tensor:
    """Layer norm, RMS norm, or none where a layer has its norms elsewhere."""
    if norm is None or isinstance(norm, nn.Identity):
        return x_D
    if isinstance(norm, nn.RMSNorm):
        return x_D / (x_D.pow(2).mean() + 1e-5).sqrt() * norm.weight
    centred = x_D - x_D.mean()
    return centred / (centred.pow(2).mean() + norm.eps).sqrt() * norm.weight + norm.bias


def linear(x_I: Tensor, module: nn.Linear) -> Tensor:
    return module.weight @ x_I + (module.bias if module.bias is not None else 0.0)


def attention_head(q_H: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query against the keys it sees; exactly zero if there are none."""
    if not keys:
        return torch.zeros_like(q_H)
    weights = torch.stack([q_H @ key / math.sqrt(q_H.numel()) for key in keys]).softmax(0)
    return sum(weight * value for weight, value in zip(weights, values))


def rotated(x_H: Tensor, norm: nn.Module | None, position: int, decoder: Any) -> Tensor:
    """A query or key at a position, as a model of the core turns it: pairs of channels are complex numbers."""
    x_H = normalised(x_H, norm)
    if decoder.config.positions != "rotary":
        return x_H
    real, imaginary = x_H.chunk(2)
    speeds = decoder.config.rotary_base ** (-torch.arange(len(real)).double() / len(real))
    turned = torch.complex(real, imaginary) * torch.exp(1j * position * speeds)
    return torch.cat([turned.real, turned.imag])


def feed_forward(x_D: Tensor, layer: Any) -> Tensor:
    hidden = linear(normalised(x_D, layer.ffn.norm), layer.ffn.up)
    return normalised(x_D + linear(ACTIVATIONS[layer.ffn.activation](hidden), layer.ffn.down), layer.after_ffn)


def stack(x_CD: list[Tensor], module: Any, decoder: Any, factor: int = 1) -> list[Tensor]:
    """Causal layers over a list of blocks of k tokens."""
    for layer in module.layers:
        heads = layer.attention.heads
        triples = [linear(normalised(x, layer.attention.norm), layer.attention.qkv).chunk(3) for x in x_CD]
        attended = []
        for position, x in enumerate(x_CD):
            outputs = []
            for head in range(heads):
                parts = [[part.chunk(heads)[head] for part in triple] for triple in triples[: position + 1]]
                qk = layer.attention.qk
                query = rotated(parts[-1][0], qk.query, position * factor, decoder)
                keys = [rotated(part[1], qk.key, place * factor, decoder) for place, part in enumerate(parts)]
                outputs.append(attention_head(query, keys, [part[2] for part in parts]))
            attended.append(normalised(x + linear(torch.cat(outputs), layer.attention.out), layer.after_attention))
        x_CD = [feed_forward(x, layer) for x in attended]
    return [normalised(x, module.norm) for x in x_CD]


def pool(members: list[Tensor | None], module: Any) -> Tensor:
    """One block; None stands for a position before the first token."""
    present = [x for x in members if x is not None]
    if module.factor == 1:
        return present[0]
    if module.kind == "max":
        return torch.stack(present).amax(0)
    zero = torch.zeros_like(present[0])
    if module.kind == "avg":
        return sum(present) / module.factor
    return linear(torch.cat([zero if x is None else x for x in members]), module.conv)


def right_aligned_blocks(x_TD: list[Tensor], module: Any) -> list[Tensor]:
    """Block i of positions (i-1)k+1 .. ik, for as many i as there are outputs to serve."""
    factor = module.factor
    blocks: list[Tensor] = []
    while len(blocks) * factor < len(x_TD):
        i = len(blocks)
        positions = range((i - 1) * factor + 1, i * factor + 1)
        blocks.append(pool([x_TD[position] if position >= 0 else None for position in positions], module))
    return blocks


def embed(tokens_T: Tensor, embedding: Any) -> list[Tensor]:
    words = [embedding.words.weight[token] * embedding.scale for token in tokens_T]
    if embedding.positions is None:
        return words
    return [word + embedding.positions.weight[position] for position, word in enumerate(words)]


def topdown_features(tokens_T: Tensor, decoder: Any, activation: str) -> Tensor:
    """(T,) -> (T, D)."""
    x_TD = embed(tokens_T, decoder.embed)
    coarse: list[Tensor] = []
    coarse_factor = 0
    for scale in decoder.scales:
        blocks = [normalised(block, scale.norm) for block in right_aligned_blocks(x_TD, scale.pool)]
        if coarse:
            fused = []
            for i, pooled in enumerate(blocks):
                above, place = divmod(i * scale.factor, coarse_factor)
                dim = pooled.numel()
                upsample = scale.join.upsample
                rows = slice(place // scale.factor * dim, (place // scale.factor + 1) * dim)
                seen = upsample.conv.weight[rows] @ coarse[above] + upsample.bias
                function = ACTIVATIONS["swish" if activation == "swiglu" else activation]
                fused.append(function(linear(torch.cat([pooled, seen]), scale.join.linear)))
            blocks = fused
        coarse, coarse_factor = stack(blocks, scale.stack, decoder, scale.factor), scale.factor
    return torch.stack(coarse)


def bottomup_features(tokens_T: Tensor, decoder: Any) -> Tensor:
    """(T,) -> (T, D)."""
    x_TD = embed(tokens_T, decoder.embed)
    by_factor: dict[int, list[Tensor]] = {}
    fine, factor = x_TD, 1
    for scale in decoder.coarse:
        whole = range(0, len(fine) - scale.ratio + 1, scale.ratio)
        pooled = [normalised(pool(list(fine[start : start + scale.ratio]), scale.pool), scale.norm) for start in whole]
        factor *= scale.ratio
        fine = stack(pooled, scale.stack, decoder, factor) if pooled else []
        by_factor[factor] = fine
    attention, layer = decoder.aggregate.attention, decoder.aggregate
    joined = []
    for t, x in enumerate(x_TD):
        query = linear(normalised(x, attention.norm), attention.query)
        queries = list(query.split(attention.head_dim))
        outputs = []
        for level, (factor, heads) in enumerate(attention.heads.items()):
            finished = [block for i, block in enumerate(by_factor[factor]) if (i + 1) * factor - 1 <= t]
            pairs = [linear(block, attention.coarse[level]).split(attention.head_dim) for block in finished]
            for head in range(heads):
                keys = [rotated(pair[head], attention.qk.key, i * factor, decoder) for i, pair in enumerate(pairs)]
                values = [pair[heads + head] for pair in pairs]
                query = rotated(queries.pop(0), attention.qk.query, t, decoder)
                outputs.append(attention_head(query, keys, values))
        gate = 1.0 if attention.gate is None else attention.gate.tanh()
        x = normalised(x + gate * linear(torch.cat(outputs), attention.out), layer.after_attention)
        joined.append(feed_forward(x, layer))
    return torch.stack(stack(joined, decoder.stack, decoder))


def coarse_features(tokens_T: Tensor, decoder: Any) -> Tensor:
    """(T,) -> (C, D), one for each k-gram."""
    blocks = right_aligned_blocks(embed(tokens_T, decoder.embed), decoder.scale.pool)
    scale = decoder.scale
    normed = [normalised(block, scale.norm) for block in blocks]
    return torch.stack(stack(normed, scale.stack, decoder, decoder.factor))


def bag_of_words_loss(log_probs_CV: Tensor, targets_T: Tensor, factor: int) -> Tensor:
    """The cross-entropy of every block against the uniform distribution over its tokens, by its number of tokens."""
    total = log_probs_CV.new_zeros(())
    for block, log_probs_V in enumerate(log_probs_CV):
        bag = targets_T[block * factor : (block + 1) * factor]
        uniform_V = torch.zeros_like(log_probs_V)
        for target in bag:
            uniform_V[target] += 1.0 / len(bag)
        total = total - len(bag) * (uniform_V * log_probs_V).sum()
    return total
