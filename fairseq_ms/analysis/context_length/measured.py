"""On how many tokens before it an output of a streaming model depends: by formula and by trying it out."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_ms.errors import UsageError
from fairseq_ms.lm.streaming import StreamingDecoder, StreamingLanguageModel
from fairseq_ms.models.compressive_transformer import CompressiveTransformerDecoder
from fairseq_ms.models.transformer_ql import TransformerQLDecoder
from fairseq_ms.models.transformer_xl import TransformerXLDecoder
from fairseq_ms.modules.streaming.memory import Memory


@dataclass(frozen=True)
class ContextLength:
    """Tokens before an output that it depends on: of a segment's first output, of its last, and the mean.

    Attributes:
        minimum: of the first output of a segment
        maximum: of the segment's end: ``minimum`` plus the segment
        average: the mean of both, the paper's n_c
    """

    minimum: int
    maximum: int
    average: float

    @classmethod
    def of(cls, minimum: int, segment: int) -> ContextLength:
        return cls(minimum, minimum + segment, minimum + segment / 2)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def transformer_xl(segment: int, memory: int, layers: int) -> ContextLength:
    """Every layer reaches a memory further back."""
    return ContextLength.of(layers * memory, segment)


def compressive_transformer(segment: int, memory: int, compressed: int, rate: int, layers: int) -> ContextLength:
    """Every layer reaches a memory and ``rate`` times a compressed memory further back."""
    return ContextLength.of(layers * (memory + rate * compressed), segment)


def transformer_ql(segment: int, memory: int, scale_layers: dict[int, int], output_layers: int) -> ContextLength:
    """Figure 4, with line 10 corrected to ``min_clen += min(cur_mlen, n_s) * n_s / cur_slen``.

    As printed, that line adds a number of states, not of tokens, and misses Figure 5's 44 and Tables 1, 3 and 5.
    ``scale_layers`` maps scales to numbers of layers. Without a memory nothing before the segment is seen.
    """
    if memory == 0:
        return ContextLength.of(0, segment)
    factors = list(scale_layers)
    # n_s / cur_slen is what a state of the scale stands for.
    minimum, states, per_state = 0, memory, 1
    for number, factor in enumerate(factors):
        minimum += scale_layers[factor] * states * per_state
        if number + 1 < len(factors):
            ratio = factors[number + 1] // factor
            minimum += min(states, segment) * per_state
            states = memory + segment - min((memory + segment) // ratio, segment)
            per_state *= ratio
    return ContextLength.of(minimum + output_layers * memory, segment)


def by_formula(decoder: StreamingDecoder) -> ContextLength:
    """The paper's context length of a model."""
    if isinstance(decoder, TransformerQLDecoder):
        layers = {lengths.factor: len(stack) for lengths, stack in zip(decoder.lengths, decoder.scales)}
        return transformer_ql(decoder.segment_len, decoder.mem_len, layers, len(decoder.final))
    assert isinstance(decoder, TransformerXLDecoder)
    count = len(decoder.layers)
    if isinstance(decoder, CompressiveTransformerDecoder):
        return compressive_transformer(
            decoder.segment_len, decoder.mem_len, decoder.compressed_mem_len, decoder.rate, count
        )
    return transformer_xl(decoder.segment_len, decoder.mem_len, count)


def measured(model: Any, seed: int = 1) -> ContextLength:
    """The context length of the model itself: the farthest token whose change changes an output.

    Every token of a stream is changed in a row of its own, and whatever an output of the last segment moves with
    is its context. Weights and inputs are random, of the model's own shape and in double precision; with the
    trained ones a dependency could be too small to see.
    """
    if not isinstance(model, StreamingLanguageModel):
        raise UsageError(f"--measure needs a model with a memory, not a {type(model).__name__}")
    decoder = _randomised(model.decoder, seed)
    segment = decoder.segment_len
    length = (decoder.memory_reach() + 2) * segment
    generator = torch.Generator().manual_seed(seed)
    width = decoder.layers_cfg.dim
    stream = torch.randn(length, width, generator=generator, dtype=torch.float64)
    farthest = [0] * segment
    rows = max(1, 2**22 // (length * width))
    for start in range(0, length, rows):
        changed_at = torch.arange(start, min(start + rows, length))
        inputs = stream.repeat(changed_at.numel(), 1, 1)
        # Of the same shape, because matrix products of another shape round differently.
        reference = _last_segment(decoder, inputs)
        noise = torch.randn(changed_at.numel(), width, generator=generator, dtype=torch.float64)
        inputs[torch.arange(changed_at.numel()), changed_at] = 3 * noise
        moved = (_last_segment(decoder, inputs) - reference).abs().amax(-1) > 0
        for offset in range(segment):
            position = length - segment + offset
            seen = changed_at[moved[:, offset]]
            if seen.numel():
                farthest[offset] = max(farthest[offset], position - int(seen.min()))
    return ContextLength(farthest[0], max(farthest) + 1, (farthest[0] + max(farthest) + 1) / 2)


def _randomised(decoder: StreamingDecoder, seed: int) -> StreamingDecoder:
    """A copy on the CPU with weights large enough for every path to show."""
    decoder = copy.deepcopy(decoder).cpu().double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() > 1 and not name.startswith(("embed", "project", "adaptive")):
                scale = parameter.size(-1) ** -0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return decoder


@torch.no_grad()
def _last_segment(decoder: StreamingDecoder, inputs_RTD: Tensor) -> Tensor:
    """Outputs (R, n_s, D) of the last segment of embedded streams."""
    memory: Memory = decoder.new_memory(inputs_RTD.size(0))
    states = memory.states
    for start in range(0, inputs_RTD.size(1), decoder.segment_len):
        run = decoder.begin(states)
        outputs = decoder.advance(run, inputs_RTD[:, start : start + decoder.segment_len])
        states, _ = decoder.finish(run)
    return outputs
