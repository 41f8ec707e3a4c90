"""Who attends to whom, by scale (Multi-scale Transformer LMs, Figure 1, c to e, for every model of the paper)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from fairseq.models import FairseqLanguageModel
from torch import Tensor

from fairseq_ms.errors import UsageError
from fairseq_ms.models.bottomup import BottomUpDecoder
from fairseq_ms.models.coarse import CoarseDecoder
from fairseq_ms.models.retina import RetinaDecoder
from fairseq_ms.models.topdown import TopDownDecoder
from fairseq_ms.models.vanilla import VanillaDecoder
from fairseq_ms.ops.masks import Blocks, Mask, Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By scale, finest first: a light-to-dark row that is told apart without colour, too.
COLOURS = ("#c0392b", "#27ae60", "#f1c40f", "#2980b9", "#8e44ad")


def tokens_seen(model: FairseqLanguageModel, length: int) -> dict[int, Tensor]:
    """By scale k, finest first, which of T tokens an output reads through a layer of that scale: (T, T) booleans.

    A row is an output, a column a token; a block that is attended to is read with all of its tokens. What a token
    itself passes on beside attention is not counted. Raises UsageError for a model of another paper.
    """
    decoder = model.decoder
    output, token = torch.arange(length)[:, None], torch.arange(length)[None]
    if isinstance(decoder, RetinaDecoder):
        return {group.factor: _window(group.factor, group.near, group.far, length) for group in decoder.groups}
    if isinstance(decoder, VanillaDecoder):
        return {1: token <= output}
    if isinstance(decoder, BottomUpDecoder):
        # Only blocks that are finished; those at 1x are tokens.
        scales = [1, *(scale.factor for scale in decoder.coarse)]
        return {k: token < (output + 1) // k * k for k in scales}
    if isinstance(decoder, TopDownDecoder | CoarseDecoder):
        # Right-aligned blocks: block i ends with token ik and serves the outputs from there on.
        scales = [scale.factor for scale in decoder.scales] if isinstance(decoder, TopDownDecoder) else [decoder.factor]
        return {k: token <= output // k * k for k in sorted(scales)}
    raise UsageError(
        "--arch must be a model of the multi-scale paper (vanilla_lm, retina_lm, multiscale_topdown, "
        f"multiscale_bottomup or coarse_lm): got a {type(model).__name__}"
    )


def _window(scale: int, near: int, far: int, length: int) -> Tensor:
    mask: Mask = Window(near, far) if scale == 1 else Blocks(scale, near, far)
    blocks = mask.visible(torch.arange(length)[:, None], torch.arange(-(-length // scale))[None])
    return blocks.repeat_interleave(scale, dim=1)[:, :length]


def rows(seen: dict[int, Tensor]) -> list[list[object]]:
    """The table's rows: of each scale, what the last output sees, in tokens and in positions of that scale."""
    return [
        [f"{scale}x", int(mask[-1].sum()), -(-int(mask[-1].sum()) // scale), int(mask.sum())]
        for scale, mask in seen.items()
    ]


def draw(figure: Figure, seen: dict[int, Tensor]) -> None:
    """A panel of all scales, each token in the colour of the finest one that reads it, and with several one of each."""
    from matplotlib.colors import ListedColormap

    scales = list(seen)
    together = np.zeros(seen[scales[0]].shape)
    for number in reversed(range(len(scales))):
        together[seen[scales[number]].numpy()] = number + 1
    panels = [("all scales", together)] if len(scales) > 1 else []
    panels += [(f"{k}x", (number + 1) * seen[k].numpy()) for number, k in enumerate(scales)]
    colours = ListedColormap(["white", *(COLOURS[number % len(COLOURS)] for number in range(len(scales)))])
    for axes, (title, colour) in zip(np.atleast_1d(figure.subplots(1, len(panels), sharey=True)), panels):
        axes.imshow(colour, cmap=colours, vmin=0, vmax=len(scales), interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("token")
    figure.axes[0].set_ylabel("output")
