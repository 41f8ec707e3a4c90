"""Which blocks a multi-scale model looks at (Multi-scale Transformer LMs, Figure 1)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import report
from fairseq_ms.tools.arguments import add_counts, add_outputs, register

if TYPE_CHECKING:
    from fairseq.models import FairseqLanguageModel
    from torch import Tensor

    from fairseq_ms.core.scales import Scale

# A colour for each scale, from the finest; they differ in lightness too.
COLOURS = ("#b5482a", "#3f7fbf", "#2f5d3a", "#8a6fb0", "#c9a227", "#5b5b5b")
# Blocks are told apart by taking turns between a full and a light shade.
SHADES = (1.0, 0.55)


@dataclass(frozen=True)
class Pattern:
    """What one scale of a layer shows to the positions of a text: the panel's title, and k tokens of a block.

    ``block`` (T, T) is the index of the block through which query t (row) sees token p (column), -1 where it does not.
    """

    title: str
    factor: int
    block: Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "fairseq-ms plot attention --arch ARCH [FLAGS OF FAIRSEQ-TRAIN ...] --png FILE [OPTIONS]"
    parser.set_defaults(fairseq_flags=[])
    add_counts(parser, ("--length", 48, "tokens of the text"))
    add_outputs(parser)


def run(args: argparse.Namespace) -> None:
    """Print what the last position sees, and draw what all see."""
    register()
    from fairseq_ms.core import Retina
    from fairseq_ms.tools import untrained

    # On the meta device: what is drawn depends on the layout alone, and presets are large.
    model, cfg = untrained.build(args.fairseq_flags, 1000, device="meta", own=args.own_flags)
    name, drawn = str(cfg.model._name), patterns(model, args.length)
    # The windows of one layer together see near and far.
    core = model.decoder.core
    together = isinstance(core, Retina) and len(core.turns) == 1 and len(drawn) > 1
    rows = []
    for pattern in drawn:
        seen = pattern.block[-1][pattern.block[-1] >= 0]
        rows.append([pattern.title, len(seen.unique()), len(seen)])
    print(f"{name}: what the last of {args.length} positions sees")
    print(report.format_table(["attention", "blocks", "tokens"], rows))
    panels = [{"title": panel.title, "factor": panel.factor, "block": panel.block.tolist()} for panel in drawn]
    write = partial(draw, drawn=drawn, name=name, together=together)
    report.write_outputs(args, {"arch": name, "panels": panels}, write, 3.2 * (len(drawn) + together), 3.5)


def patterns(model: FairseqLanguageModel, length: int) -> list[Pattern]:
    """The attention of a multi-scale model over ``length`` tokens, finest scale first; UsageError for other models."""
    import torch

    from fairseq_ms.core import BottomUp, CoarseLM, Retina, TopDown, Vanilla
    from fairseq_ms.core.scales import Scale

    core, positions = model.decoder.core, torch.arange(length)
    if isinstance(core, Vanilla):
        return [_finished("all heads, 1x", Scale(1), positions)]
    if isinstance(core, Retina):
        several = len(core.turns) > 1
        return [
            _finished(f"{f'turn {turn}: ' * several}{scale.heads} heads, {scale.window}", scale, positions)
            for turn, scales in enumerate(core.turns, 1)
            for scale in scales
        ]
    if isinstance(core, TopDown):
        factors = sorted(scale.factor for scale in core.scales)
        return [_right_aligned(f"layers at {factor}x", factor, positions) for factor in factors]
    if isinstance(core, CoarseLM):
        return [_right_aligned(f"layers at {core.factor}x", core.factor, positions)]
    if isinstance(core, BottomUp):
        aggregated = [
            _finished(f"aggregation, {heads} heads, {factor}x", Scale(factor), positions)
            for factor, heads in core.aggregate.attention.heads.items()
        ]
        return [_finished("layers at 1x", Scale(1), positions), *aggregated]
    raise UsageError(
        "--arch of plot attention must be a multi-scale model (vanilla_lm, retina_lm, multiscale_topdown, "
        f"multiscale_bottomup or coarse_lm): got a {type(model).__name__}"
    )


def _finished(title: str, scale: Scale, positions: Tensor) -> Pattern:
    """Blocks jk .. (j+1)k-1, seen once they are finished and while they are in the window."""
    index = positions // scale.factor
    seen = scale.visible(positions[:, None], index)
    return Pattern(title, scale.factor, index.where(seen, -1))


def _right_aligned(title: str, factor: int, positions: Tensor) -> Pattern:
    """Blocks (i-1)k+1 .. ik, of which the outputs ik .. (i+1)k-1 see those up to i."""
    index = -(-positions // factor)
    seen = index <= positions[:, None] // factor
    return Pattern(title, factor, index.where(seen, -1))


def draw(figure: report.Figure, drawn: Sequence[Pattern], name: str, together: bool) -> None:
    """A panel for each pattern; with ``together``, one more first in which finer scales cover coarser ones."""
    coloured = [(pattern, COLOURS[index % len(COLOURS)]) for index, pattern in enumerate(drawn)]
    panels = [(pattern.title, [(pattern, colour)]) for pattern, colour in coloured]
    if together:
        panels.insert(0, (f"{name}, all heads", coloured[::-1]))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, layers) in zip(axes, panels):
        for pattern, colour in layers:
            ax.imshow(_image(pattern.block.numpy(), colour), interpolation="nearest")
        ax.grid(False)
        length = layers[0][0].block.size(0)
        ticks = [0, length // 2, length - 1]
        ax.set(xlabel="token", xticks=ticks, yticks=ticks)
        ax.set_title(title, fontsize=10)
    axes[0].set_ylabel("position")


def _image(block: np.ndarray, colour: str) -> np.ndarray:
    """(T, T) block indices -> (T, T, 4) red, green, blue and opacity: transparent where nothing is seen."""
    rgb = np.array(list(bytes.fromhex(colour[1:]))) / 255
    shade = np.where(block % 2 == 0, *SHADES)[..., None]
    # Lighter is whiter, not more transparent: what lies below must not shine through.
    return np.concatenate([1 - shade * (1 - rgb), block[..., None] >= 0], axis=-1)
