"""Subramanian et al. (2020), Sections 3.1 to 3.4 and 6.2: logits of one sequence, position by position.

Each model takes the parameters by name, the flags and one sequence of tokens, and returns one vector of logits (V,) for
each position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.references.parts import (
    Vector,
    Weights,
    activation,
    attend,
    feed_forward,
    head,
    linear,
    norm,
    pool,
    predict,
    rows,
    within,
    zeros,
)

Flags = dict[str, Any]


def mixed(attention: Weights, states: Sequence[Vector]) -> list[Vector]:
    """Every state plus those just before it, times the weights of ``--short-conv``, the last row for the nearest."""
    weights = attention.get("short_conv.weight", ())
    return [
        state + sum((weights[-d] * states[t - d] for d in range(1, min(t, len(weights)) + 1)), zeros(len(state)))
        for t, state in enumerate(states)
    ]


def turned(flags: Flags, attention: Weights, kind: str, state: Vector, position: int, number: int = 0) -> Vector:
    """A head's "query" or "key", with ``--qk-norm`` of mean square 1, times its gain, and its temperature if scaled.

    By ``--positions``: rotary ones turn channels (c, c + H/2) by position * base^(-2c/H).
    """
    if f"qk.{kind}.weight" in attention:
        state = norm(within(attention, f"qk.{kind}"), state)
    if kind == "query" and "qk.temperature" in attention:
        state = state * attention["qk.temperature"][number]
    if flags.get("positions") != "rotary":
        return state
    half = len(state) // 2
    base = flags.get("rotary_base", 10000.0)
    angles = torch.tensor([position * base ** (-c / half) for c in range(half)], dtype=torch.float64)
    first, second = state[:half], state[half:]
    turned = first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()
    return torch.cat(turned)


def of_a_scale(
    flags: Flags,
    attention: Weights,
    t: int,
    query: Vector,
    starts: Sequence[int],
    keys: Sequence[Vector],
    values: Sequence[Vector],
    first: int,
    count: int,
    total: int,
) -> list[Vector]:
    """What a scale's ``count`` heads, the first of which is number ``first`` of all ``total``, answer to a query at t.

    The keys are those of blocks that begin at ``starts``; with ``--kv-heads``, heads side by side have the same.
    """
    answers = []
    for n in range(count):
        of_keys = len(keys[0]) * total // len(query) if keys else 1
        own = n * of_keys // count, of_keys
        answers.append(
            attend(
                turned(flags, attention, "query", head(query, first + n, total), t, first + n),
                [turned(flags, attention, "key", head(key, *own), start) for start, key in zip(starts, keys)],
                [head(value, *own) for value in values],
                [attention["qk.sinks"][first + n]] if "qk.sinks" in attention else [],
            )
        )
    return answers


def by_scale(text: str) -> dict[int, str]:
    """``"4x=2,1x=3"`` as ``{1: "3", 4: "2"}``, the finest scale first."""
    pairs = (item.split("x=") for item in text.split(","))
    return dict(sorted((int(factor), value) for factor, value in pairs))


def heads_at(flags: Flags, factors: Sequence[int]) -> dict[int, int]:
    """The number of heads for each scale: equally many unless told otherwise."""
    if flags.get("scale_heads"):
        return {factor: int(count) for factor, count in by_scale(flags["scale_heads"]).items()}
    return {factor: flags["decoder_attention_heads"] // len(factors) for factor in factors}


def embed(weights: Weights, flags: Flags, tokens: Sequence[int]) -> list[Vector]:
    """x_t: the embedding of the word, times sqrt(D) if told so, plus that of its position where these are learned."""
    words, places = weights["decoder.embed.words.weight"], weights.get("decoder.embed.positions.weight")
    scale = math.sqrt(len(words[0])) if flags.get("scale_embedding") else 1.0
    return [words[token] * scale + (places[t] if places is not None else 0.0) for t, token in enumerate(tokens)]


def in_front(part: Weights, state: Vector, flags: Flags) -> Vector:
    """What attention and feed-forward read: LN(x), or with ``--decoder-normalize-after`` x."""
    return state if flags.get("decoder_normalize_after") else norm(within(part, "norm"), state)


def post_norm(layer: Weights, name: str, state: Vector, flags: Flags) -> Vector:
    """The sum of a residual connection, or with ``--decoder-normalize-after`` LN of it."""
    return norm(within(layer, name), state) if flags.get("decoder_normalize_after") else state


def residual_feed_forward(layer: Weights, state: Vector, flags: Flags) -> Vector:
    """x + W2 f(W1 LN(x))."""
    ffn = within(layer, "ffn")
    out = state + feed_forward(ffn, in_front(ffn, state, flags), flags.get("activation_fn", "gelu"))
    return post_norm(layer, "after_ffn", out, flags)


def self_attention(
    layer: Weights,
    projection: str,
    states: Sequence[Vector],
    flags: Flags,
    k: int = 1,
) -> list[Vector]:
    """x + W_o [head_1, ..., head_N], where block t of k tokens attends to itself and the blocks before it."""
    heads, weights = flags["decoder_attention_heads"], within(layer, "attention")
    normed = mixed(weights, [in_front(weights, state, flags) for state in states])
    width, projected = len(weights["out.weight"][0]), within(weights, projection)
    of_keys = (len(projected["weight"]) - width) // 2
    queries, keys, values = (
        [linear(rows(projected, begin, end), state) for state in normed]
        for begin, end in ((0, width), (width, width + of_keys), (width + of_keys, width + 2 * of_keys))
    )
    out = []
    for t, state in enumerate(states):
        blocks = [s * k for s in range(t + 1)], keys[: t + 1], values[: t + 1]
        answers = of_a_scale(flags, weights, t * k, queries[t], *blocks, 0, heads, heads)
        summed = state + linear(within(weights, "out"), torch.cat(answers))
        out.append(post_norm(layer, "after_attention", summed, flags))
    return out


def transformer(stack: Weights, states: Sequence[Vector], count: int, flags: Flags, k: int = 1) -> list[Vector]:
    """``count`` autoregressive layers over blocks of k tokens, and after the last of pre-LN ones a norm."""
    states = list(states)
    for number in range(count):
        layer = within(stack, f"layers.{number}")
        states = self_attention(layer, "qkv", states, flags, k=k)
        states = [residual_feed_forward(layer, state, flags) for state in states]
    return [in_front(stack, state, flags) for state in states]


def vanilla_lm(weights: Weights, flags: Flags, tokens: Sequence[int]) -> list[Vector]:
    """Section 3.1; with ``--scale-windows`` (Figure 1d), a retina that has 1x alone."""
    if flags.get("scale_windows"):
        return retina_lm(weights, flags, tokens)
    states = embed(weights, flags, tokens)
    out = transformer(within(weights, "decoder.stack"), states, flags["decoder_layers"], flags)
    return [predict(weights, state) for state in out]


def windows_of(flags: Flags, number: int) -> list[tuple[int, int, float, int]]:
    """The windows of a layer, finest scale first: tokens of a block k, near, far, and heads."""
    turns = flags["scale_windows"].split("|")
    items = [item.split("x=") for item in turns[number % len(turns)].split(",")]
    windows = []
    for k, text in sorted(items, key=lambda item: int(item[0])):
        span, _, own = text.partition("*")
        near, far = span.split(":")
        shared = flags["decoder_attention_heads"] // len(items)
        if flags.get("scale_heads"):
            shared = heads_at(flags, [])[int(k)]
        windows.append((int(k), int(near), int(far) if far else math.inf, int(own or shared)))
    return windows


def retina_lm(weights: Weights, flags: Flags, tokens: Sequence[int]) -> list[Vector]:
    """Section 3.4 and Listing 3: keys and values of a head come from the layer's input, pooled at the head's scale."""
    states = embed(weights, flags, tokens)
    for number in range(flags["decoder_layers"]):
        windows = windows_of(flags, number)
        factors, total = sorted({window[0] for window in windows}), sum(window[3] for window in windows)
        layer = within(weights, f"decoder.layers.{number}")
        attention = within(layer, "attention")
        normed = mixed(attention, [in_front(attention, state, flags) for state in states])
        out = []
        for t, state in enumerate(states):
            width = len(attention["out.weight"][0])
            query = linear(rows(within(attention, "fine"), 0, width), normed[t])
            answers: list[Vector] = []
            for place, (k, near, far, heads) in enumerate(windows):
                # The rows of a scale's keys, and as many of its values, are those of all its windows in their order.
                shared = total // (flags.get("kv_heads") or total)
                of_scale = [count // shared for factor, *_, count in windows if factor == k]
                before = sum(count // shared for factor, *_, count in windows[:place] if factor == k)
                head_dim, level = width // total, factors.index(k)
                starts: list[int] = []
                keys: list[Vector] = []
                values: list[Vector] = []
                for start in range(0, len(tokens), k):
                    # A block is visible once it is finished, and while its first position lies in the window.
                    if start + k - 1 > t or not near <= t - start < far:
                        continue
                    if k == 1:
                        block, offset, projection = normed[start], width, within(attention, "fine")
                    else:
                        pool_weights = {
                            name.removeprefix(f"pools.{level - 1}.conv."): value for name, value in attention.items()
                        }
                        block = pool(flags["downsampler"], pool_weights, normed[start : start + k])
                        offset, projection = 0, within(attention, f"coarse.{level - 1}")
                    starts.append(start)
                    for into, first in ((keys, before), (values, sum(of_scale) + before)):
                        own = (offset + count * head_dim for count in (first, first + heads // shared))
                        into.append(linear(rows(projection, *own), block))
                answers += of_a_scale(flags, attention, t, query, starts, keys, values, len(answers), heads, total)
            summed = state + linear(within(attention, "out"), torch.cat(answers))
            out.append(post_norm(layer, "after_attention", summed, flags))
        states = [residual_feed_forward(layer, state, flags) for state in out]
    return [predict(weights, in_front(within(weights, "decoder"), state, flags)) for state in states]


def newest_blocks(states: Sequence[Vector], k: int) -> list[list[Vector | None]]:
    """Block i holds positions (i-1)k+1 .. ik, the newest k that output ik may use; ``None`` stands before the text."""
    ends = range(0, len(states), k)
    return [[states[t] if t >= 0 else None for t in range(end - k + 1, end + 1)] for end in ends]


def pooled(part: Weights, kind: str, blocks: Sequence[Sequence[Vector | None]]) -> list[Vector]:
    """d(x, k), and the layer norm after it."""
    conv = {name.removeprefix("pool.conv."): value for name, value in part.items()}
    states = [block[0] if len(block) == 1 else pool(kind, conv, block) for block in blocks]
    return [norm(within(part, "norm"), state) for state in states if state is not None]


def multiscale_topdown(weights: Weights, flags: Flags, tokens: Sequence[int]) -> list[Vector]:
    """Section 3.2 and Listing 1: from the coarsest scale to the finest."""
    counts = {k: int(count) for k, count in by_scale(flags["scale_layers"]).items()}
    x = embed(weights, flags, tokens)
    coarse: list[Vector] = []
    coarse_k = 0
    for place, k in enumerate(sorted(counts, reverse=True)):
        scale = within(weights, f"decoder.scales.{place}")
        states = pooled(scale, flags["downsampler"], newest_blocks(x, k))
        if coarse:
            join, ratio, dim = within(scale, "join"), coarse_k // k, len(x[0])
            for j, state in enumerate(states):
                # A transposed convolution of kernel and stride ``ratio`` makes so many vectors of one coarse state.
                child = j % ratio
                matrix = join["upsample.conv.weight"][child * dim : (child + 1) * dim]
                from_above = matrix @ coarse[j // ratio] + join["upsample.bias"]
                both = linear(within(join, "linear"), torch.cat([state, from_above]))
                # Two scales are joined without the gate of swiglu.
                function = flags.get("activation_fn", "gelu")
                states[j] = activation("swish" if function == "swiglu" else function, both)
        coarse, coarse_k = transformer(within(scale, "stack"), states, counts[k], flags, k), k
    return [predict(weights, state) for state in coarse]


def multiscale_bottomup(weights: Weights, flags: Flags, tokens: Sequence[int]) -> list[Vector]:
    """Section 3.3: each scale pools the outputs of the finer one; then one layer aggregates them at every token."""
    counts = {k: int(count) for k, count in by_scale(flags["scale_layers"]).items()}
    factors = [k for k in counts if k > 1]
    heads = heads_at(flags, factors)
    x = embed(weights, flags, tokens)
    finer, finer_k = x, 1
    h: dict[int, list[Vector]] = {}
    for place, k in enumerate(factors):
        scale, ratio = within(weights, f"decoder.coarse.{place}"), k // finer_k
        whole = [finer[i * ratio : (i + 1) * ratio] for i in range(len(finer) // ratio)]
        h[k] = transformer(within(scale, "stack"), pooled(scale, flags["downsampler"], whole), counts[k], flags, k)
        finer, finer_k = h[k], k

    aggregate = within(weights, "decoder.aggregate")
    attention = within(aggregate, "attention")
    out = []
    normed = mixed(attention, [in_front(attention, state, flags) for state in x])
    for t, state in enumerate(x):
        query = linear(within(attention, "query"), normed[t])
        answers: list[Vector] = []
        for place, k in enumerate(factors):
            projection = within(attention, f"coarse.{place}")
            width = len(projection["weight"]) // 2
            finished = [block for i, block in enumerate(h[k]) if (i + 1) * k - 1 <= t]
            keys = [linear(rows(projection, 0, width), block) for block in finished]
            values = [linear(rows(projection, width, 2 * width), block) for block in finished]
            seen = range(0, len(finished) * k, k), keys, values
            answers += of_a_scale(flags, attention, t, query, *seen, len(answers), heads[k], sum(heads.values()))
        gate = torch.tanh(attention["gate"]) if flags.get("aggregation_gate") else 1.0
        state = state + gate * linear(within(attention, "out"), torch.cat(answers))
        state = post_norm(aggregate, "after_attention", state, flags)
        out.append(residual_feed_forward(aggregate, state, flags))
    return [predict(weights, state) for state in transformer(within(weights, "decoder.stack"), out, counts[1], flags)]


def coarse_lm(weights: Weights, flags: Flags, tokens: Sequence[int]) -> list[Vector]:
    """Section 6.2: block i gives one distribution for all the k tokens after it, outputs ik .. (i+1)k-1."""
    ((k, count),) = by_scale(flags["scale_layers"]).items()
    states = pooled(
        within(weights, "decoder.scale"), flags["downsampler"], newest_blocks(embed(weights, flags, tokens), k)
    )
    states = transformer(within(weights, "decoder.scale.stack"), states, int(count), flags, k)
    return [predict(weights, states[t // k]) for t in range(len(tokens))]
