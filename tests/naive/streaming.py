"""The three streaming models as the papers' figures define them: one token, one key, one list at a time.

States are Python lists of (B, D) vectors, one a position; nothing is shared with the package but the weights.
"""

import copy
import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.naive.multiscale import ACTIVATIONS, linear

States = list[Tensor]


def norm(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, torch.nn.RMSNorm):
        return x / ((x**2).mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (variance + module.eps).sqrt() * module.weight + module.bias


def sinusoid(distance: int, dim: int) -> Tensor:
    angles = [distance / 10000.0 ** (2 * i / dim) for i in range((dim + 1) // 2)]
    both = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(both[:dim], dtype=torch.float64)


def attention(layer: Any, segment: States, memory: States) -> States:
    """MultiHeadSAttn of Transformer-QL, Figure 2b, with Transformer-XL's relative positions."""
    att = layer.attention
    dim = att.qkv.in_features
    heads, width = att.u.shape
    w_q, w_k, w_v = att.qkv.weight.split(heads * width)
    keys_from = memory + segment
    if att.norm is not None:
        keys_from = [norm(att.norm, x) for x in keys_from]
    queries = keys_from[len(memory) :]
    outputs = []
    for t, q_from in enumerate(queries):
        position = len(memory) + t
        merged = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            q = q_from @ w_q[part].T
            scores = []
            for j in range(position + 1):
                k = keys_from[j] @ w_k[part].T
                r = att.position.weight[part] @ sinusoid(position - j, dim)
                score = ((q + att.u[head]) * k).sum(-1) + ((q + att.v[head]) * r).sum(-1)
                scores.append(score / math.sqrt(width))
            weights = torch.stack(scores, -1).softmax(-1)
            values = [weights[:, j : j + 1] * (keys_from[j] @ w_v[part].T) for j in range(position + 1)]
            merged.append(sum(values))
        outputs.append(torch.cat(merged, -1) @ att.out.weight.T)
    return outputs


def compute(layer: Any, segment: States, memory: States) -> States:
    """Compute of Transformer-QL, Figure 2b, post-LN as drawn or pre-LN as in its Appendix E."""
    attended = attention(layer, segment, memory)
    outputs = []
    for x, y in zip(segment, attended):
        if layer.ffn.norm is not None:
            x = x + y
            outputs.append(x + feed_forward(layer, norm(layer.ffn.norm, x)))
        else:
            x = norm(layer.after_attention, x + y)
            outputs.append(norm(layer.after_ffn, x + feed_forward(layer, x)))
    return outputs


def feed_forward(layer: Any, x: Tensor) -> Tensor:
    return torch.stack(
        [linear(ACTIVATIONS[layer.ffn.activation](linear(row, layer.ffn.up)), layer.ffn.down) for row in x]
    )


def shift(states: States, memory: States) -> States:
    """Shift of Transformer-QL, Figure 2d."""
    joined = memory + states
    return [x.detach() for x in joined[len(joined) - len(memory) :]]


def logits(network: Any, states: States) -> Tensor:
    return torch.stack([network.logits(x) for x in states], dim=1)


def embed(network: Any, tokens: Tensor) -> States:
    weight = network.embed.words.weight
    return [weight[tokens[:, t]] * math.sqrt(weight.size(1)) for t in range(tokens.size(1))]


def zeros(count: int, rows: int, dim: int) -> States:
    return [torch.zeros(rows, dim, dtype=torch.float64) for _ in range(count)]


def segments(tokens: Tensor, length: int) -> list[Tensor]:
    return [tokens[:, i : i + length] for i in range(0, tokens.size(1), length)]


def transformer_xl(model: Any, tokens: Tensor) -> Tensor:
    """Transformer-QL, Figure 3."""
    network = model.decoder.core
    rows, dim = tokens.size(0), network.config.dim
    memories = [zeros(network.mem_len, rows, dim) for _ in network.layers]
    outputs: States = []
    for part in segments(tokens, network.segment_len):
        states = embed(network, part)
        for index, layer in enumerate(network.layers):
            before = memories[index]
            memories[index] = shift(states, before)
            states = compute(layer, states, before)
        outputs += states
    return logits(network, outputs)


def compressive_transformer(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compressive Transformer, Algorithm 1, and the reconstruction loss of Algorithm 2 over whole segments."""
    network = model.decoder.core
    rows, dim = tokens.size(0), network.config.dim
    rate, length = network.config.compression_rate, network.segment_len
    memories = [zeros(network.mem_len, rows, dim) for _ in network.layers]
    compressed = [zeros(network.config.compressed_mem_len, rows, dim) for _ in network.layers]
    outputs: States = []
    losses = []
    for part in segments(tokens, length):
        states = embed(network, part)
        inputs = []
        for index, layer in enumerate(network.layers):
            inputs.append(states)
            states = compute(layer, states, compressed[index] + memories[index])
        outputs += states
        if part.size(1) < length:
            continue
        loss = torch.zeros((), dtype=torch.float64)
        for index, layer in enumerate(network.layers):
            old = [x.detach() for x in (memories[index] + inputs[index])[:length]]
            conv = network.compress[index].conv
            # The weight reads ``rate`` states side by side.
            new = [torch.cat(old[i : i + rate], -1) @ conv.weight.T + conv.bias for i in range(0, length, rate)]
            loss = loss + reconstruction(layer, inputs[index], old, new)
            memories[index] = shift(inputs[index], memories[index])
            compressed[index] = shift(new, compressed[index])
        losses.append(loss)
    total = torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float64)
    return logits(network, outputs), total


def reconstruction(layer: Any, states: States, old: States, new: States) -> Tensor:
    att = layer.attention
    heads, width = att.u.shape
    w_q, w_k, w_v = (w.detach() for w in att.qkv.weight.split(heads * width))

    def prepared(x: Tensor) -> Tensor:
        if att.norm is None:
            return x
        return norm(copy.deepcopy(att.norm).requires_grad_(False), x)

    squares = []
    for x in states:
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            q = prepared(x.detach()) @ w_q[part].T
            read = []
            for memory in (old, new):
                keys = [prepared(m) @ w_k[part].T for m in memory]
                weights = torch.stack([(q * k).sum(-1) / math.sqrt(width) for k in keys], -1).softmax(-1)
                values = [weights[:, i : i + 1] * (prepared(m) @ w_v[part].T) for i, m in enumerate(memory)]
                read.append(sum(values))
            squares.append((read[0] - read[1]) ** 2)
    return torch.cat(squares, -1).mean()


def transformer_ql(model: Any, tokens: Tensor) -> Tensor:
    """Transformer-QL, Figure 2e; ``mem_len`` 0 is its Appendix D's model, which has no memory at any scale."""
    network = model.decoder.core
    rows, dim = tokens.size(0), network.config.dim
    n_s, n_m = network.segment_len, network.mem_len
    window = n_s + n_m
    factors = [scale.factor for scale in network.lengths]
    # Line 3, and the lengths of Transformer-QL, Section 2.3.
    seg_len, mem_len = [n_s], [n_m]
    for fine, coarse in itertools.pairwise(factors):
        seg_len.append(min((seg_len[-1] + mem_len[-1]) // (coarse // fine), seg_len[-1]))
        mem_len.append(window - seg_len[-1] if n_m else 0)
    memory = [[zeros(m, rows, dim) for _ in range(len(layers) + 1)] for m, layers in zip(mem_len, network.scales)]
    final_memory = [zeros(n_m, rows, dim) for _ in network.final]
    outputs: States = []
    for part in segments(tokens, n_s):
        real = part.size(1)
        # The rest of an unfinished segment is in the future of what there is.
        padded = F.pad(part, (0, n_s - real), value=4)
        states = embed(network, padded)
        accumulated: list[tuple[States, States]] = []
        for i, layers in enumerate(network.scales):
            if i:
                ratio = factors[i] // factors[i - 1]
                fine, fine_memory = accumulated[-1]
                joined = fine_memory + fine
                joined = joined[len(joined) % ratio :]
                blocks = [joined[i : i + ratio] for i in range(0, len(joined), ratio)]
                pooled = []
                for block in blocks:
                    stacked = torch.stack(block)
                    pooled.append(stacked.amax(0) if network.config.compression == "max" else stacked.mean(0))
                states = pooled[-seg_len[i] :]
            moved = n_s // factors[i]
            for index, layer in enumerate(layers):
                before = memory[i][index]
                memory[i][index] = shift(states[:moved], before)
                states = compute(layer, states, before)
            if layers[0].ffn.norm is not None:
                # Every layer of the figure ends in a layer norm; a pre-LN layer does not, so its scale does.
                states = [norm(network.scale_norms[i], x) for x in states]
            accumulated.append((states, memory[i][-1]))
            memory[i][-1] = shift(states[:moved], memory[i][-1])
        combined = []
        for position in range(n_s):
            total = torch.zeros(rows, dim, dtype=torch.float64)
            for factor, (states_of_scale, memory_of_scale) in zip(factors, accumulated):
                # The last state of the segment ends with the segment's last token.
                behind = (n_s - 1 - position + factor - 1) // factor
                everything = memory_of_scale + states_of_scale
                if behind < len(everything):
                    total = total + everything[len(everything) - 1 - behind]
            combined.append(total / len(factors))
        states = combined
        for index, layer in enumerate(network.final):
            before = final_memory[index]
            final_memory[index] = shift(states, before)
            states = compute(layer, states, before)
        outputs += states[:real]
    return logits(network, outputs)
