"""What a training step keeps and takes against context length (Transformer-QL, Section 2.4)."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairseq_ms.errors import UsageError
from fairseq_ms.papers import context_length
from fairseq_ms.tools import report
from fairseq_ms.tools.arguments import add_counts, add_list, add_outputs, register

if TYPE_CHECKING:
    import torch

# Eight layers each, as in the paper's experiments; the last has the paper's outlook of more than two scales.
MODELS: dict[str, list[str]] = {
    "Transformer-XL, 8 layers": ["--arch", "transformer_xl", "--decoder-layers", "8"],
    "Transformer-QL, 1x=3 2x=3 + 2": ["--arch", "transformer_ql", "--scale-layers", "1x=3,2x=3"],
    "Transformer-QL, 1x=2 2x=2 4x=2 + 2": ["--arch", "transformer_ql", "--scale-layers", "1x=2,2x=2,4x=2"],
}
VOCABULARY = 1000


Point = dict[str, float]
"""A model at one window, a stream: ``segment`` n_s, which is n_m, too; average ``context`` in tokens (Appendix B);
``megabytes`` kept for the backward pass; median ``milliseconds`` of a step, forward and backward."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "segment lengths, multiples of 4; the memory is as long (default: 4,8,16,32,64)"
    add_list(parser, "--segments", default=[4, 8, 16, 32, 64], help=help)
    add_counts(
        parser,
        ("--decoder-embed-dim --dim", 256, "model dimension"),
        ("--batch-size --streams", 8, "streams"),
        ("--rounds", 5, "timed steps"),
    )
    add_outputs(parser)


def run(args: argparse.Namespace) -> None:
    """Print and draw what each model keeps and takes."""
    dim, streams = args.decoder_embed_dim, args.batch_size
    if any(segment % 4 for segment in args.segments):
        raise UsageError(f"--segments must be multiples of 4, the coarsest scale: got {args.segments}")
    if dim % 2 or (dim > 64 and dim % 64):
        raise UsageError(f"--decoder-embed-dim must be even, and a multiple of 64 above that: got {dim}")
    register()
    curves = measure(sorted(set(args.segments)), dim, streams, args.rounds)
    print(f"one segment of one stream, d = {dim}, {streams} streams a step, segment and memory equally long")
    rows = [[name, *point.values()] for name, points in curves.items() for point in points]
    print(report.format_table(["model", "segment", "average context", "MB kept", "ms a step"], rows))
    found = {"dim": dim, "streams": streams, "rounds": args.rounds, "curves": curves}
    report.write_outputs(args, found, lambda figure: draw(figure, curves), width=10)


def measure(segments: Sequence[int], dim: int, streams: int, rounds: int) -> dict[str, list[Point]]:
    """Every model of ``MODELS`` at every segment length; times are taken in turns."""
    curves: dict[str, list[Point]] = {name: [] for name in MODELS}
    for segment in segments:
        built = {name: Step(flags, segment, dim, streams) for name, flags in MODELS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in built}
        for turn in range(rounds + 1):
            for name, step in built.items():
                began = time.perf_counter()
                step.run()
                if turn:
                    seconds[name].append(time.perf_counter() - began)
        for name, step in built.items():
            found = {"segment": segment, "context": step.context, "megabytes": step.kept() / streams / 1e6}
            curves[name].append({**found, "milliseconds": 1e3 * statistics.median(seconds[name]) / streams})
    return curves


class Step:
    """A training step of a model on the second segment of its streams, up to the features."""

    def __init__(
        self,
        flags: list[str],
        segment: int,
        dim: int,
        streams: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        import torch

        from fairseq_ms.tools import untrained

        sizes = ["--decoder-embed-dim", str(dim), "--decoder-ffn-embed-dim", str(4 * dim)]
        sizes += ["--decoder-attention-heads", str(max(1, dim // 64)), "--decoder-normalize-before"]
        lengths = ["--tokens-per-sample", str(segment), "--mem-len", str(segment)]
        task = ["--task", "streaming_language_modeling", "--share-decoder-input-output-embed"]
        model = untrained.build([*flags, *sizes, *lengths, *task], VOCABULARY)[0]
        self.model = model.to(device, dtype).train()
        self.context = context_length.by_formula(self.model.decoder.core).average
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(4, VOCABULARY, (streams, segment), generator=generator).to(device)
        with torch.no_grad():
            self.memory = self.model.decoder.core.stream(self.tokens, None)[1]

    def forward(self) -> torch.Tensor:
        return self.model.decoder.core.stream(self.tokens, self.memory)[0].sum()

    def run(self) -> None:
        self.model.zero_grad()
        self.forward().backward()

    def kept(self) -> int:
        from fairseq_ms.tools.saved_bytes import saved_bytes

        return saved_bytes(self.forward, self.model)


def draw(figure: report.Figure, curves: dict[str, list[Point]]) -> None:
    """Two panels against context length: bytes and time; lines are told apart by marker and dash."""
    sides = (("megabytes", "kept for backward, MB a stream"), ("milliseconds", "training step, ms a stream"))
    for axes, (value, label) in zip(figure.subplots(1, 2), sides):
        lines = {name: [(point["context"], point[value]) for point in points] for name, points in curves.items()}
        report.plot_panel(axes, lines, "average context, tokens", label, legend=value == "megabytes")
