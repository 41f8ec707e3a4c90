"""Hajra (2020), Figures 2 and 3, and the papers behind it: logits of one stream, segment by segment.

Dai et al. (2019) for the layer with relative positions, Rae et al. (2020) for compressed memories. Each model takes the
parameters by name, the flags and all tokens of a stream, and returns one vector of logits (V,) for each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.references.parts import (
    Vector,
    Weights,
    attend,
    feed_forward,
    head,
    linear,
    norm,
    predict,
    rows,
    softmax,
    within,
    zeros,
)

Flags = dict[str, Any]


def sinusoid(distance: int, dim: int) -> Vector:
    """R_d: sines, then cosines, of the distance times 10000^(-2i/D)."""
    angles = [distance / 10000.0 ** (2 * i / dim) for i in range((dim + 1) // 2)]
    both = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    return torch.tensor(both[:dim], dtype=torch.float64)


def compute(layer: Weights, segment: Sequence[Vector], memory: Sequence[Vector], flags: Flags) -> list[Vector]:
    """Figure 2b: one Transformer-XL layer. A state sees the memory, the segment before it and itself."""
    attention = within(layer, "attention")
    before = flags.get("decoder_normalize_before", False)
    heads, width = attention["u"].shape
    window = [*memory, *segment]
    if before:
        window = [norm(within(attention, "norm"), state) for state in window]
    inner = heads * width
    queries, keys, values = (
        [linear(rows(within(attention, "qkv"), i * inner, (i + 1) * inner), state) for state in window]
        for i in range(3)
    )
    positions = [attention["position.weight"] @ sinusoid(distance, len(window[0])) for distance in range(len(window))]
    out = []
    for place, state in enumerate(segment):
        now = len(memory) + place
        answers = []
        for n in range(heads):
            query = head(queries[now], n, heads)
            scores = []
            for then in range(now + 1):
                # Dai et al., Section 3.3: (q + u) k + (q + v) r.
                content = (query + attention["u"][n]) @ head(keys[then], n, heads)
                where = (query + attention["v"][n]) @ head(positions[now - then], n, heads)
                scores.append((content + where) / math.sqrt(width))
            shares = softmax(scores)
            seen = (share * head(values[then], n, heads) for then, share in enumerate(shares))
            answers.append(sum(seen, zeros(width)))
        state = state + linear(within(attention, "out"), torch.cat(answers))
        ffn, function = within(layer, "ffn"), flags.get("activation_fn", "relu")
        if before:
            state = state + feed_forward(ffn, norm(within(ffn, "norm"), state), function)
        else:
            state = norm(within(layer, "after_attention"), state)
            state = norm(within(layer, "after_ffn"), state + feed_forward(ffn, state, function))
        out.append(state)
    return out


def last(states: Sequence[Vector], count: int) -> list[Vector]:
    """states[-count:], also where count is 0."""
    return list(states[len(states) - count :])


def shift(segment: Sequence[Vector], memory: Sequence[Vector]) -> list[Vector]:
    """Figure 2d: the newest states, as many as there were, through which no gradient flows."""
    return [state.detach() for state in last([*memory, *segment], len(memory))]


def embed(weights: Weights, tokens: Sequence[int]) -> list[Vector]:
    """Rows of the embedding matrix times sqrt(D), as in Transformer-XL."""
    words = weights["decoder.embed.words.weight"]
    return [words[token] * math.sqrt(words.shape[1]) for token in tokens]


def segments(tokens: Sequence[int], length: int) -> list[list[int]]:
    """The stream in segments; the last may be unfinished."""
    return [list(tokens[start : start + length]) for start in range(0, len(tokens), length)]


def empty(count: int, weights: Weights) -> list[Vector]:
    """A memory that nothing has entered yet."""
    return [zeros(weights["decoder.embed.words.weight"].shape[1]) for _ in range(count)]


def transformer_xl(weights: Weights, flags: Flags, tokens: Sequence[int]) -> list[Vector]:
    """Figure 3."""
    memories = [empty(flags["mem_len"], weights) for _ in range(flags["decoder_layers"])]
    out = []
    for segment in segments(tokens, flags["tokens_per_sample"]):
        states = embed(weights, segment)
        for number, memory in enumerate(memories):
            inputs = states
            states = compute(within(weights, f"decoder.layers.{number}"), inputs, memory, flags)
            memories[number] = shift(inputs, memory)
        out += [predict(weights, state) for state in states]
    return out


def compressive_transformer(weights: Weights, flags: Flags, tokens: Sequence[int]) -> tuple[list[Vector], Vector]:
    """Rae et al. (2020), Section 3: logits, and the attention-reconstruction loss.

    A segment's loss is the sum over layers of the mean squared difference; a stream's, the mean over its segments.
    """
    length, rate = flags["tokens_per_sample"], flags["compression_rate"]
    count = flags["decoder_layers"]
    memories = [empty(flags["mem_len"], weights) for _ in range(count)]
    compressed = [empty(flags["compressed_mem_len"], weights) for _ in range(count)]
    out: list[Vector] = []
    loss = torch.zeros((), dtype=torch.float64)
    for segment in segments(tokens, length):
        states = embed(weights, segment)
        for number in range(count):
            layer, inputs = within(weights, f"decoder.layers.{number}"), states
            states = compute(layer, inputs, [*compressed[number], *memories[number]], flags)
            if len(segment) < length:
                continue
            leaving = [state.detach() for state in [*memories[number], *inputs][: len(segment)]]
            conv = within(weights, f"decoder.compress.{number}.conv")
            new = [linear(conv, torch.cat(leaving[i : i + rate])) for i in range(0, len(leaving), rate)]
            loss += reconstruction(layer, inputs, leaving, new, flags)
            compressed[number] = shift(new, compressed[number])
            memories[number] = shift(inputs, memories[number])
        out += [predict(weights, state) for state in states]
    return out, loss / (len(tokens) // length)


def reconstruction(
    layer: Weights, segment: Sequence[Vector], old: Sequence[Vector], new: Sequence[Vector], flags: Flags
) -> Vector:
    """Algorithm 2 of Rae et al.: how much the segment's content-based attention changes by the compression.

    Nothing but the compression learns from it.
    """
    attention = {name: value.detach() for name, value in within(layer, "attention").items()}
    segment = [state.detach() for state in segment]
    heads, width = attention["u"].shape
    inner = heads * width

    def projected(states: Sequence[Vector], which: int) -> list[Vector]:
        if flags.get("decoder_normalize_before", False):
            states = [norm(within(attention, "norm"), state) for state in states]
        return [linear(rows(within(attention, "qkv"), which * inner, (which + 1) * inner), s) for s in states]

    differences = []
    for query in projected(segment, 0):
        answers = []
        for states in (old, new):
            seen = [[[head(s, n, heads) for s in projected(states, which)] for which in (1, 2)] for n in range(heads)]
            answers.append(torch.cat([attend(head(query, n, heads), *seen[n]) for n in range(heads)]))
        differences.append(answers[0] - answers[1])
    return torch.stack(differences).square().mean()


def transformer_ql(weights: Weights, flags: Flags, tokens: Sequence[int], finest: int = 1) -> list[Vector]:
    """Figure 2e, whose line numbers stand beside the code; ``finest`` is the j from which droppath keeps scales."""
    layers_at = {int(k): int(n) for k, n in (item.split("x=") for item in flags["scale_layers"].split(","))}
    factors = sorted(layers_at)
    before = flags.get("decoder_normalize_before", False)
    n_s, n_m = [flags["tokens_per_sample"]], [flags["mem_len"]]
    for fine, coarse in itertools.pairwise(factors):
        n_s.append(min((n_s[-1] + n_m[-1]) // (coarse // fine), n_s[-1]))
        n_m.append(n_s[0] + n_m[0] - n_s[-1] if flags["mem_len"] else 0)
    # One memory for the input of every layer, and one for the output of every scale.
    memory: dict[str, list[Vector]] = {}
    out = []
    for segment in segments(tokens, n_s[0]):
        whole = segment + [segment[-1]] * (n_s[0] - len(segment))  # Only the past counts: anything may fill it up.
        s = embed(weights, whole)  # 6
        shift_len = n_s[0]  # 8
        acc_inputs = []  # 9
        shifting: dict[str, list[Vector]] = {}
        for i, k in enumerate(factors):  # 11
            for number in range(layers_at[k]):  # 13
                name = f"decoder.scales.{i}.{number}"
                m = memory.setdefault(name, empty(n_m[i], weights))
                shifting[name] = s[:shift_len]  # 15
                s = compute(within(weights, name), s, m, flags)  # 14
            if before:
                s = [norm(within(weights, f"decoder.scale_norms.{i}"), state) for state in s]
            m = memory.setdefault(f"output {i}", empty(n_m[i], weights))
            shifting[f"output {i}"] = s[:shift_len]
            acc_inputs.append((s, m))  # 17
            if k != factors[-1]:  # 18
                ratio = factors[i + 1] // k
                both = [*m, *s]
                both = both[len(both) % ratio :]
                blocks = [both[start : start + ratio] for start in range(0, len(both), ratio)]
                function = torch.amax if flags["compression"] == "max" else torch.mean
                s = last([function(torch.stack(block), 0) for block in blocks], n_s[i + 1])  # 19
                shift_len = n_s[0] // factors[i + 1]  # 20
        s = accumulate(acc_inputs[finest - 1 :], factors[finest - 1 :], n_s[0])  # 24
        for number in range(flags["output_layers"]):  # 28
            name = f"decoder.final.{number}"
            m = memory.setdefault(name, empty(n_m[0], weights))
            shifting[name] = s  # 30
            s = compute(within(weights, name), s, m, flags)  # 29
        out += [predict(weights, state) for state in s[: len(segment)]]
        for name, states in shifting.items():
            memory[name] = shift(states, memory[name])
    return out


def accumulate(
    acc_inputs: Sequence[tuple[list[Vector], list[Vector]]], factors: Sequence[int], length: int
) -> list[Vector]:
    """The mean over scales of the latest state of each that has ended by each position of the segment."""
    out = []
    for p in range(length):
        total = zeros(len(acc_inputs[0][0][0]))
        for (s, m), k in zip(acc_inputs, factors):
            states = [*m, *s]
            # The last state ends with the segment, at length - 1, and each one before it k positions earlier.
            ended = [state for back, state in enumerate(reversed(states)) if length - 1 - back * k <= p]
            if ended:
                total = total + ended[0]
        out.append(total / len(acc_inputs))
    return out
