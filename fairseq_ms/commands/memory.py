"""Memory of a training step by part and purpose, measured; --fit GIB finds allocations of layers that fit."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import arguments, report
from fairseq_ms.tools.arguments import add_counts, add_cpu, add_list, add_model, add_outputs

if TYPE_CHECKING:
    import torch
    from fairseq.dataclass import FairseqDataclass
    from fairseq.models import FairseqLanguageModel
    from omegaconf import DictConfig

    from fairseq_ms.tools.training_step import Parts

BOOKCORPUS = 31300
"""Symbols of BookCorpus, over which a model is built that is no preset, unless it is told otherwise."""
BYTES = 260
"""Those of bytes, with fairseq's own four."""
GB = 1e9
SCALES = (1, 4, 16, 64)
"""Those of --sweep."""
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--", "**", "||")
Layers = Mapping[int, int]
"""Numbers of layers by scale."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    of_path = "of --path: folder with its dictionary (default: the one trained on)"
    parser.add_argument("--data", type=arguments.place, help=of_path)
    add_counts(
        parser,
        ("--batch-size", None, "samples (default: 1)"),
        (
            "--vocabulary",
            None,
            "symbols (default: as many as the preset's data have, or BookCorpus, or adaptive cutoffs need)",
        ),
        ("--most-layers", 16, "of --fit, at a scale"),
        ("--top --show", 10, "allocations of --fit to print"),
    )
    parser.add_argument("--no-measurement", action="store_true", help="follow the shapes of a step without running it")
    parser.add_argument("--fit", type=float, metavar="GIB", help="which layers a scale fit into so many GiB")
    help = "memory and forward time of one layer at 1x, 4x, 16x and 64x for these numbers of tokens (Figure 2)"
    add_list(parser, "--sweep", help=help)
    add_cpu(parser)
    add_outputs(parser)


def run(args: argparse.Namespace) -> None:
    """Print the footprint, the allocations of --fit or the table of --sweep."""
    arguments.check_model(args)
    if args.data and not args.path:
        raise UsageError(f"--data goes with --path, whose dictionary it has: got {args.data} without it")
    if args.vocabulary and args.path:
        raise UsageError(f"--vocabulary must be left out with --path, which has its own: got {args.vocabulary}")
    if args.fit is not None and not 0 < args.fit < float("inf"):
        raise UsageError(f"--fit must be a number of GiB above 0: got {args.fit}")
    for flag in ("sweep", "png"):
        if args.fit is not None and getattr(args, flag):
            raise UsageError(f"--fit and --{flag} must not be given together: got both")
    arguments.register()
    asked = _asked(args)
    if args.fit is not None:
        _fit(args, asked)
    elif args.sweep:
        _sweep(args, asked)
    else:
        _footprint(args, asked)


class _Asked(NamedTuple):
    """Whose memory it is, and of which step: a model that is loaded, or None for one that is yet to be built."""

    cfg: DictConfig
    vocabulary: int
    loaded: FairseqLanguageModel | None
    batch: int
    tokens: int
    device: torch.device
    dtype: torch.dtype

    @property
    def linear(self) -> bool:
        """Whether it is trained by ``linear_cross_entropy``."""
        return bool(self.cfg.criterion._name == "linear_cross_entropy")

    @property
    def muon(self) -> bool:
        """Whether it is trained by Muon."""
        return getattr(self.cfg.optimizer, "_name", None) == "muon"

    def model(self) -> FairseqLanguageModel:
        """The model, in the precision that it is trained in."""
        from fairseq_ms.tools import untrained

        if self.loaded is not None:
            return self.loaded.to(self.dtype)
        return untrained.build_model(self.cfg, self.vocabulary, device=self.device, dtype=self.dtype)

    def __str__(self) -> str:
        return f"{self.cfg.model._name}: {self.batch} x {self.tokens} tokens"


def _asked(args: argparse.Namespace) -> _Asked:
    import torch

    from fairseq_ms.lm.config import enough_symbols
    from fairseq_ms.tools import checkpoints, training_step, untrained

    loaded = None
    if args.path:
        checkpoint = checkpoints.load(args.path, args.data, args.cpu)
        cfg, vocabulary = checkpoint.cfg, len(checkpoint.dictionary)
        loaded = None if args.no_measurement else checkpoint.model
        # Of its own dictionary.
        cfg.model.unpredicted_symbols = None
    else:
        cfg = untrained.parse(args.fairseq_flags, args.own_flags)
        for flag, own, known in (
            ("--criterion", cfg.criterion, ("cross_entropy", "linear_cross_entropy", "adaptive_loss")),
            ("--optimizer", cfg.optimizer, ("adam", "adamw", "muon")),
        ):
            if (name := getattr(own, "_name", None)) is not None and name not in known:
                raise UsageError(f"{flag} must be one whose memory is known, {', '.join(known)}: got {name}")
        vocabulary = args.vocabulary or enough_symbols(cfg.model, _symbols_of(cfg.model))
        untrained.build_model(cfg, vocabulary, device="meta")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    dtype = torch.half if cfg.common.fp16 else torch.bfloat16 if cfg.common.bf16 else torch.float
    return _Asked(cfg, vocabulary, loaded, args.batch_size or 1, training_step.tokens_of(cfg), device, dtype)


def _symbols_of(flags: DictConfig) -> int:
    """As many as a preset's data have; of another model of characters those of bytes, or else BookCorpus's."""
    from fairseq_ms.commands.config import SIZES

    counted = json.loads(SIZES.read_text(encoding="utf-8"))
    other = BYTES if hasattr(flags, "segmentation") else BOOKCORPUS
    return int(counted[flags._name][0]) if flags._name in counted else other


def _footprint(args: argparse.Namespace, asked: _Asked) -> None:
    from fairseq_ms.tools import training_step

    batch, tokens = asked.batch, asked.tokens
    print(f"{asked}, {asked.vocabulary} symbols, {asked.dtype.itemsize} bytes a number")
    parts: Parts = {}
    with training_step.ShapesAlone() if args.no_measurement else nullcontext():
        model = asked.model()
        try:
            parts = training_step.step_parts(model, batch, tokens, asked.linear)
        except UsageError as why:
            print(f"no breakdown: {why}")
        weights = training_step.weight_bytes(model, asked.muon)
    kept = training_step.total(parts)
    gradient = training_step.logits_gradient(model, batch, tokens, asked.linear)
    print(format_parts(parts, {"gradient of logits": gradient, **weights}))
    result: dict[str, object] = {"arch": str(asked.cfg.model._name), "batch": batch, "tokens": tokens}
    result |= {"vocabulary": asked.vocabulary, "gradient_of_logits": gradient, "weights": weights}
    if parts:
        rows = [{"part": part, "total": sum(purposes.values()), **purposes} for part, purposes in parts.items()]
        result |= {"rows": rows, "kept": kept}
    if not args.no_measurement:
        a_target = kept / (batch * tokens)
        result |= {"measured": kept, "measured_per_target": a_target}
        print(f"kept for backward, measured: {kept / GB:.4f} GB, {a_target / 1e3:.1f} kB a scored target")
        peak = training_step.cuda_peak(model, batch, tokens, asked.linear)
        if peak is not None:
            result["max_memory_allocated"] = peak
            print(f"torch.cuda.max_memory_allocated: {peak / GB:.4f} GB")
    if args.png and not parts:
        raise UsageError(f"--png draws the breakdown, and there is none for {asked.cfg.model._name}")
    report.write_outputs(args, result, partial(draw, parts=parts), width=9)


def format_parts(parts: Parts, extra: Mapping[str, float]) -> str:
    """A row for each part in GB (1e9 bytes), then further lines and the total."""
    shown, rows = _purposes(parts), list[list[object]]()
    for part, purposes in parts.items():
        rows.append([part, *(purposes.get(name, 0.0) / GB for name in shown), sum(purposes.values()) / GB])
    kept = sum(sum(purposes.values()) for purposes in parts.values())
    further = {**extra, "total": kept + sum(extra.values())}
    rows += [[name, *[None] * len(shown), value / GB] for name, value in further.items()]
    return report.format_table(["part", *shown, "total (GB)"], rows)


def _purposes(parts: Parts) -> list[str]:
    """The purposes for which any part has bytes."""
    return list(dict.fromkeys(name for purposes in parts.values() for name, value in purposes.items() if value))


def draw(figure: report.Figure, parts: Parts) -> None:
    """One stacked bar for each part, purposes told apart by hatching."""
    axes = figure.add_subplot()
    bottoms = [0.0] * len(parts)
    for name, hatch in zip(_purposes(parts), itertools.cycle(HATCHES)):
        heights = [purposes.get(name, 0.0) / GB for purposes in parts.values()]
        bars = axes.bar(range(len(parts)), heights, bottom=bottoms, label=name, edgecolor="black", linewidth=0.5)
        for bar in bars:
            bar.set(hatch=hatch, alpha=0.75)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    axes.set_xticks(range(len(parts)), [part.replace(" ", "\n") for part in parts])
    report.finish_axes(axes, "", "memory (GB)", legend=False)
    # Bars leave no room inside the axes.
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _fit(args: argparse.Namespace, asked: _Asked) -> None:
    from fairseq_ms.lm.scales import layer_scales

    if "|" in (windows := getattr(asked.cfg.model, "scale_windows", None) or ""):
        raise UsageError(f"--fit needs layers that are alike: got windows that layers take in turns, {windows}")
    text = getattr(asked.cfg.model, "scale_layers", None)
    scales = [scale.factor for scale in layer_scales(text)] if text else [1]
    found = fit(partial(_step_bytes, asked), scales, args.fit * 2**30, args.most_layers, args.top)
    print(f"{asked}: allocations in {args.fit:g} GiB, best first")
    rows = [[rank, _written(layers), size / 2**30] for rank, (layers, size) in enumerate(found, 1)]
    print(report.format_table(["rank", "layers", "GiB"], rows))
    allocations = [{"layers": layers, "bytes": size} for layers, size in found]
    report.write_outputs(args, {"budget_gib": args.fit, "allocations": allocations})


def fit(
    footprint: Callable[[Layers], float], scales: Sequence[int], budget: float, most: int, count: int
) -> list[tuple[Layers, float]]:
    """The ``count`` best allocations of 1 to ``most`` layers a scale that take at most ``budget`` bytes, and the bytes.

    Layers at the finest scale count first, then those at the next one, and so on: the order of the paper's Table 4,
    where perplexity falls as layers move to finer scales, whatever becomes of the total. ``footprint`` must grow by the
    same number of bytes with every further layer of a scale, as memory does. Raises UsageError when not even one layer
    a scale fits.
    """
    smallest = dict.fromkeys(scales, 1)
    base = footprint(smallest)
    if base > budget:
        raise UsageError(
            f"--fit must leave room for one layer a scale, which takes {base / 2**30:.2f} GiB: got {budget / 2**30:g}"
        )
    cost = {scale: footprint({**smallest, scale: 2}) - base for scale in scales}
    every = (dict(zip(sorted(scales), counts)) for counts in itertools.product(range(most, 0, -1), repeat=len(scales)))
    sized = ((layers, base + sum((layers[scale] - 1) * cost[scale] for scale in scales)) for layers in every)
    return list(itertools.islice((found for found in sized if found[1] <= budget), count))


def _written(layers: Layers) -> str:
    """Layers as ``--scale-layers`` has them, coarsest scale first."""
    return ",".join(f"{scale}x={count}" for scale, count in sorted(layers.items(), reverse=True))


def _step_bytes(asked: _Asked, layers: Layers) -> float:
    """Bytes of a training step with so many layers at each scale, from a step that is followed by its shapes alone.

    They are what the step keeps, the gradient of the logits, weights, gradients and the optimizer's moments. Raises
    UsageError where shapes depend on the tokens.
    """
    from fairseq_ms.tools import training_step

    cfg = copy.deepcopy(asked.cfg)
    if getattr(cfg.model, "scale_layers", None):
        cfg.model.scale_layers = _written(layers)
    else:
        cfg.model.decoder_layers = layers[1]
    with training_step.ShapesAlone():
        model = asked._replace(cfg=cfg, loaded=None).model()
        kept = training_step.step_bytes(model, asked.batch, asked.tokens, asked.linear)
    gradient = training_step.logits_gradient(model, asked.batch, asked.tokens, asked.linear)
    return kept + gradient + sum(training_step.weight_bytes(model, asked.muon).values())


Point = dict[str, float]
"""One layer at a ``scale`` of a text of ``tokens``: ``measured`` bytes kept, and ``seconds`` of its forward pass."""


def _sweep(args: argparse.Namespace, asked: _Asked) -> None:
    from fairseq_ms.tools import untrained

    full = ("vanilla_lm", "multiscale_topdown", "multiscale_bottomup")
    if untrained.architecture(asked.cfg.model) not in full or getattr(asked.cfg.model, "scale_windows", None):
        raise UsageError(f"--sweep needs layers of full attention, which {asked.cfg.model._name} does not have")
    points = sweep(asked.cfg.model, asked.batch, args.sweep, asked.device)
    rows = [[p["tokens"], f"{p['scale']}x", p["measured"] / 1e6, p["seconds"] * 1e3] for p in points]
    print(f"one layer of {asked.cfg.model._name}, {asked.batch} samples")
    print(report.format_table(["tokens", "scale", "kept (MB)", "forward (ms)"], rows))
    report.write_outputs(args, {"batch": asked.batch, "sweep": points}, partial(draw_sweep, points=points), width=9)


def sweep(cfg: FairseqDataclass, batch: int, lengths: Sequence[int], device: torch.device) -> list[Point]:
    """Bytes that one layer of full attention keeps and its forward time, by length and scale."""
    import torch

    from fairseq_ms.core.config import LayerConfig
    from fairseq_ms.core.layers import TransformerLayer
    from fairseq_ms.lm.config import layer_settings
    from fairseq_ms.tools import training_step
    from fairseq_ms.tools.saved_bytes import saved_bytes

    settings = replace(LayerConfig(**layer_settings(cfg)), checkpoint=False)
    layer = TransformerLayer(settings).train().to(device)
    points: list[Point] = []
    for length, scale in itertools.product(lengths, SCALES):
        x = torch.randn(batch, max(1, length // scale), settings.dim, device=device, requires_grad=True)
        forward = partial(layer, x)
        kept = saved_bytes(forward, layer)
        seconds = training_step.shortest(forward, device, repeats=5)
        points.append({"tokens": length, "scale": scale, "measured": kept, "seconds": seconds})
    return points


def draw_sweep(figure: report.Figure, points: Sequence[Point]) -> None:
    """Memory on the left, forward time on the right, one line a scale."""
    sides = (("measured", 1e6, "kept for backward by one layer (MB)"), ("seconds", 1e-3, "forward of one layer (ms)"))
    for axes, (name, unit, label) in zip(figure.subplots(1, 2), sides):
        lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for point in points:
            lines[f"{point['scale']}x"].append((point["tokens"], point[name] / unit))
        report.powers_of_two(axes)
        axes.set_yscale("log")
        report.plot_panel(axes, lines, "tokens", label)
