"""What ``--scale-windows`` accepts leaves no token unseen, and what it refuses is told in one sentence."""

import random

import pytest
import torch

from fairseq_ms.core import Scale
from fairseq_ms.lm.scales import window_scales
from fairseq_ms.models.retina import RetinaFlags
from fairseq_ms.presets.registry import PRESETS
from tests.configs import retina_lm
from tests.registry import build, dictionary


def unseen(scales: tuple[Scale, ...]) -> int:
    """How many pairs of a position and a token no farther than far_m - k_m before it no window shows."""
    reach = max((scale.far or 99) - scale.factor for scale in scales)
    positions = torch.arange(2 * reach + 105)
    seen = torch.zeros(len(positions), len(positions), dtype=torch.bool)
    for scale in scales:
        blocks = scale.visible(positions[:, None], torch.arange(len(positions) // scale.factor))
        seen[:, : blocks.size(1) * scale.factor] |= blocks.repeat_interleave(scale.factor, dim=1)
    # The last block may be unfinished.
    distance = (positions[:, None] - positions)[:, : len(positions) - 99]
    return int(((distance >= 0) & (distance <= reach) & ~seen[:, : len(positions) - 99]).sum())


@pytest.mark.parametrize("seed", range(60))
def test_every_token_up_to_the_last_window_is_seen_through_accepted_windows(seed: int) -> None:
    flags = retina_lm.random_flags(random.Random(seed))
    model = build("retina_lm", flags, dictionary(5)).decoder.core
    assert [unseen(tuple(scales)) for scales in model.turns] == len(model.turns) * [0]


def test_the_windows_of_every_preset_are_accepted_and_leave_no_hole() -> None:
    presets = {arch: preset.values for arch, preset in PRESETS.items() if preset.values.get("scale_windows")}
    for arch, values in {**presets, "retina_lm": {"scale_windows": RetinaFlags.scale_windows}}.items():
        overlap = values.get("window_overlap") == "allow"
        turns = window_scales(str(values["scale_windows"]), overlap=overlap)
        assert [unseen(scales) for scales in turns] == len(turns) * [0], arch
