"""Mujika (2023), Section 3 and Appendices A and B: likelihood of one sequence, and the loss of the first phase.

A sequence of tokens x_0 .. x_T is one chunk of x_0 alone, which is given, and chunks of what is to be predicted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from tests.references.multiscale import transformer
from tests.references.parts import Vector, Weights, activation, linear, sigmoid, within, zeros

Flags = dict[str, Any]
Chunk = tuple[int, ...]


def chunks_of(tokens: Sequence[int], flags: Flags, separators: Collection[int]) -> list[Chunk]:
    """x_0; then a chunk ends after a separator (words only) or once it is full."""
    chunks: list[Chunk] = [(tokens[0],)]
    chunk: list[int] = []
    for token in tokens[1:]:
        chunk.append(token)
        if token in separators or len(chunk) == flags["max_segment_len"]:
            chunks.append(tuple(chunk))
            chunk = []
    return [*chunks, tuple(chunk)] if chunk else chunks


def is_whole(chunk: Chunk, flags: Flags, separators: Collection[int]) -> bool:
    """Whether a chunk after x_0 has ended."""
    return chunk[-1] in separators or len(chunk) == flags["max_segment_len"]


def whole_chunks_of(tokens: Sequence[int], flags: Flags, separators: Collection[int]) -> list[Chunk]:
    """The same without a chunk that the end of the sequence cuts: what it will be spelt like is not known."""
    first, *others = chunks_of(tokens, flags, separators)
    return [first, *(chunk for chunk in others if is_whole(chunk, flags, separators))]


def lstm(cell: Weights, inputs: Sequence[Vector], capped: bool = False) -> list[Vector]:
    """Hidden states; gates in torch's order: input, forget, cell, output."""
    units = cell["weight_hh_l0"].shape[1]
    hidden, memory = zeros(units), zeros(units)
    out = []
    for state in inputs:
        gates = cell["weight_ih_l0"] @ state + cell["bias_ih_l0"] + cell["weight_hh_l0"] @ hidden + cell["bias_hh_l0"]
        i, f, g, o = (gates[n * units : (n + 1) * units] for n in range(4))
        i, f, g, o = sigmoid(i), sigmoid(f), torch.tanh(g), sigmoid(o)
        if capped:  # Appendix A: the main model's input gate is at most 1 minus its forget gate.
            i = torch.minimum(i, 1.0 - f)
        memory = f * memory + i * g
        hidden = o * torch.tanh(memory)
        out.append(hidden)
    return out


def encode(weights: Weights, flags: Flags, chunk: Chunk) -> Vector:
    """Equation 1, for as many entries as the main model has room for, padded with zeros."""
    encoder = within(weights, "encoder")
    embedded = [encoder["embed.weight"][token] for token in chunk]
    if flags["encoder"] == "mlp":
        embedded += [zeros(len(embedded[0]))] * (flags["max_segment_len"] - len(chunk))
        hidden = activation("relu", linear(within(encoder, "first"), torch.cat(embedded)))
        code = activation("relu", linear(within(encoder, "second"), hidden))
    else:
        code = lstm(within(encoder, "lstm.cell"), embedded)[-1]
    room = flags["decoder_embed_dim"] - flags["position_embed_dim"]
    return torch.cat([code, zeros(room)])[:room]


def main_model(weights: Weights, flags: Flags, codes: Sequence[Vector]) -> list[Vector]:
    """Equation 2: y_i from the encodings of chunks 0 .. i, each beside the embedding of its position."""
    main = within(weights, "main")
    states = list(codes)
    if flags["position_embed_dim"]:
        states = [torch.cat([code, main["positions.weight"][i]]) for i, code in enumerate(codes)]
    if flags["main"] == "transformer":
        return transformer(within(main, "stack"), states, flags["decoder_layers"], flags)
    return [linear(within(main, "out"), state) for state in lstm(within(main, "lstm.cell"), states, capped=True)]


def decode(weights: Weights, flags: Flags, read: Sequence[int], context: Vector) -> Vector:
    """Equation 3: logits of a chunk's next token from the tokens read and the main output before the chunk."""
    decoder = within(weights, "chunk_decoder")
    embedded = [decoder["embed.weight"][token] for token in read]
    if flags["decoder"] == "lstm":
        state = lstm(within(decoder, "lstm.cell"), [torch.cat([token, context]) for token in embedded])[-1]
    else:
        above = linear(within(decoder, "project_context"), context)
        states = [
            linear(within(decoder, "project_token"), token) + above + decoder["places.weight"][place]
            for place, token in enumerate(embedded)
        ]
        local = {**flags, "decoder_attention_heads": flags["local_attention_heads"], "positions": "learned"}
        state = transformer(within(decoder, "stack"), states, flags["local_layers"], local)[-1]
    return linear(within(weights, "project"), state)


def logits(weights: Weights, flags: Flags, separators: Collection[int], tokens: Sequence[int]) -> list[Vector]:
    """Logits (V,) of what follows each token of ``tokens``."""
    out = []
    for t in range(len(tokens)):
        # What is to be predicted is unknown: only x_0 .. x_t decide which chunk it belongs to.
        *finished, current = chunks_of(tokens[: t + 1], flags, separators)
        if not finished or is_whole(current, flags, separators):
            finished, current = [*finished, current], ()
        outputs = main_model(weights, flags, [encode(weights, flags, chunk) for chunk in finished])
        # The decoder reads the token before each that it predicts: at first the last one of the chunk before.
        read = [finished[-1][-1], *current]
        out.append(decode(weights, flags, read, outputs[-1]))
    return out


def targets_and_outputs(
    weights: Weights, flags: Flags, separators: Collection[int], rows: Sequence[Sequence[int]]
) -> list[tuple[Chunk, Vector]]:
    """Every chunk that is to be predicted in rows x_0 .. x_T, with the main model's output before it."""
    pairs = []
    for tokens in rows:
        chunks = whole_chunks_of(tokens, flags, separators)
        outputs = main_model(weights, flags, [encode(weights, flags, chunk) for chunk in chunks])
        pairs += list(zip(chunks[1:], outputs))
    return pairs


def first_phase_loss(
    weights: Weights,
    flags: Flags,
    separators: Collection[int],
    rows: Sequence[Sequence[int]],
    further: Sequence[Chunk] = (),
) -> tuple[Vector, list[int], list[int]]:
    """Equations 4 and 5 in nats, summed over all chunks to predict; ranks, and numbers of negatives, of each of them.

    Candidates are the targets of the batch and the further chunks; one spelt like the positive is no negative.
    """
    pairs = targets_and_outputs(weights, flags, separators, rows)
    candidates = [*(chunk for chunk, _ in pairs), *further]
    codes = {chunk: encode(weights, flags, chunk) for chunk in candidates}
    loss, ranks, negatives = zeros(1)[0], [], []
    for chunk, output in pairs:
        query = linear(within(weights, "query"), output) if flags.get("query", "none") == "linear" else output
        scores = {other: code @ query[: len(code)] for other, code in codes.items()}
        others = [other for other in candidates if other != chunk]
        loss = loss - scores[chunk] + torch.stack([scores[other] for other in (chunk, *others)]).exp().sum().log()
        ranks.append(len({other for other in others if scores[other] >= scores[chunk]}))
        negatives.append(len(others))
    return loss, ranks, negatives
