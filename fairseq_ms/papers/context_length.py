"""Minimum, maximum and average context length of a streaming model, by formula and measured.

Appendix B; n_c of Tables 1, 3, 5.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import arguments, report
from fairseq_ms.tools.arguments import add_model, add_outputs

if TYPE_CHECKING:
    from fairseq.dataclass import FairseqDataclass
    from fairseq.models import FairseqLanguageModel
    from torch import Tensor

    from fairseq_ms.core import LanguageModel
    from fairseq_ms.core.streaming import StreamingModel

# What Transformer-QL's Tables 1, 3 and 5 print: a model, its n_s, n_m and n_cm, and the n_c beside it.
PRINTED = (
    ("Table 1", "transformer_xl", 4, 12, 0, 98),
    ("Table 1", "compressive_transformer", 4, 6, 6, 146),
    ("Table 1", "transformer_ql", 4, 12, 0, 138),
    ("Table 1", "transformer_xl", 8, 24, 0, 196),
    ("Table 1", "compressive_transformer", 8, 12, 12, 292),
    ("Table 1", "transformer_ql", 8, 24, 0, 276),
    ("Table 3", "transformer_xl", 8, 8, 0, 68),
    ("Table 3", "transformer_ql", 8, 8, 0, 100),
    ("Table 3", "transformer_xl", 16, 16, 0, 136),
    ("Table 3", "transformer_ql", 16, 16, 0, 200),
    ("Table 3", "transformer_xl", 2, 30, 0, 241),
    ("Table 3", "transformer_ql", 2, 30, 0, 332),
    ("Table 5", "transformer_ql", 16, 0, 0, 8),
    ("Table 5", "transformer_ql", 32, 0, 0, 16),
    ("Table 5", "transformer_ql", 64, 0, 0, 32),
    ("Table 5", "transformer_ql", 128, 0, 0, 64),
)
LENGTHS = ("minimum", "maximum", "average")
# Fewer dimensions than the paper's, which do not matter to what depends on what.
NARROW = ["--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2"]


@dataclass(frozen=True)
class ContextLength:
    """Tokens before an output that it depends on: of a segment's first output, of its end, and the mean, n_c."""

    minimum: int
    maximum: int
    average: float

    @classmethod
    def of(cls, minimum: int, segment: int) -> ContextLength:
        """What the minimum and the length of a segment give."""
        return cls(minimum, minimum + segment, minimum + segment / 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, " | --paper")
    parser.add_argument("--paper", action="store_true", help="print every n_c of the paper's Tables 1, 3 and 5")
    parser.add_argument("--measure", action="store_true", help="also measure the network itself, token by token")
    add_outputs(parser, figure=False)


def run(args: argparse.Namespace) -> None:
    arguments.register()
    from fairseq_ms.core.streaming import StreamingModel
    from fairseq_ms.lm.streaming import with_a_memory
    from fairseq_ms.tools import checkpoints, untrained

    given = args.fairseq_flags[0] if args.fairseq_flags else "--path" if args.path else None
    if args.paper and given:
        raise UsageError(f"--paper prints the paper's models alone: {given} must not be given with it")
    arguments.check_model(args)
    if args.paper:
        _paper(args)
        return
    if args.path:
        loaded = checkpoints.load(args.path, cpu=True)
        model, cfg = loaded.model, loaded.cfg.model
    elif args.fairseq_flags:
        model, cfg = _untrained(args.fairseq_flags, "cpu" if args.measure else "meta", args.own_flags)
    else:
        raise UsageError("--arch, --path or --paper must be given: got none of them")
    network = model.decoder.core
    if not isinstance(network, StreamingModel):
        flag, (*most, last) = "--path" if args.path else "--arch", with_a_memory()
        arch = untrained.architecture(cfg)
        raise UsageError(f"{flag} must be a model with a memory, {', '.join(most)} or {last}: got {arch}")
    found = {"formula": by_formula(network)}
    if args.measure:
        found["measured"] = measured(network)
    print(f"tokens of context of an output, with segments of {network.segment_len} tokens")
    print(report.format_table(["", *LENGTHS], [[name, *vars(context).values()] for name, context in found.items()]))
    if not (holds := formula_holds(network)):
        known = "is measured" if args.measure else "--measure shows"
        print(f"the formula is of memories that are whole segments: this model sees farther, as {known}")
    results = {name: vars(context) for name, context in found.items()}
    report.write_outputs(args, {"segment": network.segment_len, "formula_holds": holds, "results": results})


def _untrained(
    flags: list[str], device: str = "cpu", own: Sequence[str] = ()
) -> tuple[FairseqLanguageModel, FairseqDataclass]:
    """A model and its configuration."""
    from fairseq_ms.lm.config import enough_symbols
    from fairseq_ms.tools import untrained

    cfg = untrained.parse(flags, own)
    # How many symbols there are does not matter to what depends on what, nor do weights to the formula.
    return untrained.build_model(cfg, enough_symbols(cfg.model, 100), device), cfg.model


def _paper(args: argparse.Namespace) -> None:
    rows: list[list[object]] = []
    for table, arch, segment, memory, compressed, printed in PRINTED:
        # Eight layers each; Transformer-QL's are three at 1x, three at 2x and two for the output.
        if arch == "transformer_ql":
            context = transformer_ql(segment, memory, {1: 3, 2: 3}, 2)
        else:
            context = compressive_transformer(segment, memory, compressed, 2, 8)
        sizes = f"{segment}/{memory or '-'}/{compressed or '-'}"
        rows.append([table, arch, sizes, *vars(context).values(), printed])
        if args.measure:
            flags = ["--arch", arch, "--tokens-per-sample", str(segment), "--mem-len", str(memory), *NARROW]
            flags += ["--compressed-mem-len", str(compressed)] if compressed else []
            rows[-1].append(measured(_untrained(flags)[0].decoder.core).average)
    header = ["", "model", "n_s/n_m/n_cm", *LENGTHS, "printed", *(["measured"] if args.measure else [])]
    print(report.format_table(header, rows))
    report.write_outputs(args, {"paper": [dict(zip(header, row)) for row in rows]})


def compressive_transformer(segment: int, memory: int, compressed: int, rate: int, layers: int) -> ContextLength:
    """Every layer reaches a memory and ``rate`` times a compressed memory, if there is one, further back."""
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
    from fairseq_ms.core import CompressiveTransformerConfig, TransformerQL, TransformerXL

    if isinstance(model, TransformerQL):
        layers = {scale.factor: scale.layers for scale in model.config.scales}
        return transformer_ql(model.segment_len, model.mem_len, layers, model.config.output_layers)
    assert isinstance(model, TransformerXL)
    config, compressed, rate = model.config, 0, 1
    if isinstance(config, CompressiveTransformerConfig):
        compressed, rate = config.compressed_mem_len, config.compression_rate
    return compressive_transformer(config.segment_len, config.mem_len, compressed, rate, config.layers)


def formula_holds(model: LanguageModel) -> bool:
    """Whether the memory is whole segments; what begins inside one saw as far back as its beginning did."""
    from fairseq_ms.core import CompressiveTransformerConfig

    config, tokens = model.config, model.config.mem_len
    if isinstance(config, CompressiveTransformerConfig):
        tokens += config.compression_rate * config.compressed_mem_len
    return bool(tokens % config.segment_len == 0)


def measured(model: StreamingModel) -> ContextLength:
    """The context length of the model itself: the farthest token whose change changes an output.

    Every token of a stream is changed in a row of its own, and whatever an output of the last segment moves with
    is its context. Weights and inputs are random, of the model's own shape and in double precision; with the
    trained ones a dependency could be too small to see.
    """
    import torch

    network = _randomised(model)
    segment = network.segment_len
    length = (network.memory_reach() + 2) * segment
    generator = torch.Generator().manual_seed(1)
    width = network.config.dim
    stream = torch.randn(length, width, generator=generator, dtype=torch.float64)
    farthest = [0] * segment
    rows = max(1, 2**22 // (length * width))
    for start in range(0, length, rows):
        changed_at = torch.arange(start, min(start + rows, length))
        inputs = stream.repeat(changed_at.numel(), 1, 1)
        # Of the same shape, because matrix products of another shape round differently.
        reference = _last_segment(network, inputs)
        noise = torch.randn(changed_at.numel(), width, generator=generator, dtype=torch.float64)
        inputs[torch.arange(changed_at.numel()), changed_at] = 3 * noise
        moved = (_last_segment(network, inputs) - reference).abs().amax(-1) > 0
        for offset in range(segment):
            position = length - segment + offset
            seen = changed_at[moved[:, offset]]
            if seen.numel():
                farthest[offset] = max(farthest[offset], position - int(seen.min()))
    return ContextLength(farthest[0], max(farthest) + 1, (farthest[0] + max(farthest) + 1) / 2)


def _randomised(network: StreamingModel) -> StreamingModel:
    """A copy on the CPU with weights large enough for every path to show."""
    import torch

    network = copy.deepcopy(network).cpu().double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1 and not name.startswith(("embed", "project", "adaptive")):
            scale = parameter.size(-1) ** -0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network


def _last_segment(network: StreamingModel, inputs_RTD: Tensor) -> Tensor:
    """Outputs (R, n_s, D) of the last segment of embedded streams."""
    mems = network.new_memory(inputs_RTD.size(0)).states
    for segment_RTD in inputs_RTD.split(network.segment_len, dim=1):
        outputs, moving = network.forward_segment(segment_RTD, mems, network.sinusoids(segment_RTD))
        mems, _ = network.remember(moving, mems)
    return outputs
