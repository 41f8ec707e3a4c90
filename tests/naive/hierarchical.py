"""The hierarchical encoder-decoder, read off its definition: one row, one chunk, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_ms.core.haed import LSTMDecoder, TransformerMain
from fairseq_ms.core.hierarchical.chunks import MLPEncoder


def segment(tokens: list[int], kind: str, longest: int, separators: set[int]) -> tuple[list[list[int]], list[int]]:
    """The finished chunks of a row, and the tokens of the one that is not finished."""
    chunks: list[list[int]] = []
    current: list[int] = []
    for position, token in enumerate(tokens):
        current.append(token)
        ends = position == 0 or len(current) == longest or (kind == "words" and token in separators)
        if ends:
            chunks.append(current)
            current = []
    return chunks, current


def lstm_outputs(cell: nn.LSTM, inputs: list[Tensor], capped: bool) -> list[Tensor]:
    """Hidden states of an LSTM written out, from a zero state; ``capped`` holds i at most at 1 - f."""
    (weight_ih, weight_hh, bias_ih, bias_hh) = cell.all_weights[0]
    hidden = memory = torch.zeros(cell.hidden_size, dtype=weight_hh.dtype)
    outputs = []
    for x in inputs:
        gates = weight_ih @ x + bias_ih + weight_hh @ hidden + bias_hh
        i, f, g, o = gates.chunk(4)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        if capped:
            i = torch.where(i > 1 - f, 1 - f, i)
        memory = f * memory + i * g
        hidden = o * torch.tanh(memory)
        outputs.append(hidden)
    return outputs


def encode(encoder, chunk: list[int], longest: int) -> Tensor:
    """The encoding of one chunk."""
    if isinstance(encoder, MLPEncoder):
        padded = chunk + [encoder.pad] * (longest - len(chunk))
        x = encoder.embed(torch.tensor(padded)).flatten()
        units = encoder.second(encoder.first(x).relu()).relu()
    else:
        units = lstm_outputs(encoder.lstm.cell, [encoder.embed.weight[token] for token in chunk], False)[-1]
    if units.numel() >= encoder.out_dim:
        return units[: encoder.out_dim]
    return torch.cat([units, units.new_zeros(encoder.out_dim - units.numel())])


def main_output(main, encodings: list[Tensor]) -> Tensor:
    """What the main model says after these chunks, computed from the first of them on."""
    if main.positions is not None:
        encodings = [torch.cat([e, main.positions.weight[n]]) for n, e in enumerate(encodings)]
    if isinstance(main, TransformerMain):
        x_1CD = torch.stack(encodings).unsqueeze(0)
        return main.stack(x_1CD, None, main.config.rotation(range(len(encodings)), x_1CD))[0, -1]
    return main.out(lstm_outputs(main.lstm.cell, encodings, True)[-1])


def decode(chunk_decoder, tokens: list[int], context: Tensor) -> list[Tensor]:
    """Features behind each of the tokens that the decoder reads while it predicts one chunk."""
    if isinstance(chunk_decoder, LSTMDecoder):
        inputs = [torch.cat([chunk_decoder.embed.weight[token], context]) for token in tokens]
        return lstm_outputs(chunk_decoder.lstm.cell, inputs, False)
    inputs = [
        chunk_decoder.project_token(chunk_decoder.embed.weight[token])
        + chunk_decoder.project_context(context)
        + chunk_decoder.places.weight[n]
        for n, token in enumerate(tokens)
    ]
    return list(chunk_decoder.stack(torch.stack(inputs).unsqueeze(0))[0])


def logits(model, tokens: list[int]) -> Tensor:
    """Logits (T, V) of one row without padding."""
    segmentation = model.segmentation
    separators = set(segmentation.is_separator_V.nonzero().flatten().tolist())
    features = []
    read: list[int] = []
    context = None
    for position in range(len(tokens)):
        chunks, unfinished = segment(tokens[: position + 1], segmentation.kind, segmentation.max_length, separators)
        if not unfinished:
            encodings = [encode(model.encoder, chunk, segmentation.max_length) for chunk in chunks]
            context = main_output(model.main, encodings)
            read = []
        read.append(tokens[position])
        assert context is not None, "the first symbol is a chunk of its own"
        features.append(decode(model.chunk_decoder, read, context)[-1])
    return model.project(torch.stack(features))
