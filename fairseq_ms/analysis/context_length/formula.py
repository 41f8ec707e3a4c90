"""On how many tokens before it an output of a streaming model depends, by formula (Transformer-QL, Appendix B)."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq_ms.core import CompressiveTransformerConfig, LanguageModel, TransformerQL, TransformerXL


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
        """What the minimum and the length of a segment give."""
        return cls(minimum, minimum + segment, minimum + segment / 2)


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
    for level, factor in enumerate(factors):
        minimum += scale_layers[factor] * states * per_state
        if level + 1 < len(factors):
            ratio = factors[level + 1] // factor
            minimum += min(states, segment) * per_state
            states = memory + segment - min((memory + segment) // ratio, segment)
            per_state *= ratio
    return ContextLength.of(minimum + output_layers * memory, segment)


def by_formula(model: LanguageModel) -> ContextLength:
    """The paper's context length of a model with a memory."""
    if isinstance(model, TransformerQL):
        layers = {scale.factor: scale.layers for scale in model.config.scales}
        return transformer_ql(model.segment_len, model.mem_len, layers, model.config.output_layers)
    assert isinstance(model, TransformerXL)
    config = model.config
    if isinstance(config, CompressiveTransformerConfig):
        lengths = config.segment_len, config.mem_len, config.compressed_mem_len
        return compressive_transformer(*lengths, config.compression_rate, config.layers)
    return transformer_xl(config.segment_len, config.mem_len, config.layers)
