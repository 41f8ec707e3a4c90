"""What ``--scale-windows`` accepts leaves no token unseen, and what it refuses is told in one sentence."""

import random

import pytest
import torch

from fairseq_ms.core.ops.window_attention import HeadGroup
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.scales import window_scales
from fairseq_ms.models.retina import RetinaFlags
from fairseq_ms.presets.registry import PRESETS
from tests.registry import build, dictionary


def spans(text: str, overlap: bool) -> dict[int, tuple[int, int]]:
    return {scale.factor: (scale.near, scale.far) for scale in window_scales(text, overlap)}


def unseen(windows: dict[int, tuple[int, int]]) -> int:
    """How many pairs of a position and a token at most far_m - k_m before it no window shows."""
    factors = list(windows)
    reach = windows[factors[-1]][1] - factors[-1]
    length = 2 * windows[factors[-1]][1] + 5
    positions = torch.arange(length)
    seen = torch.zeros(length, length, dtype=torch.bool)
    for factor, (near, far) in windows.items():
        blocks = HeadGroup(factor, near, far, 1).visible(positions[:, None], torch.arange(length // factor))
        seen[:, : blocks.size(1) * factor] |= blocks.repeat_interleave(factor, dim=1)
    distance = positions[:, None] - positions
    return int(((distance >= 0) & (distance <= reach) & ~seen).sum())


def random_windows(rng: random.Random, overlap: bool) -> dict[int, tuple[int, int]]:
    windows, factor, reached = {}, 1, 0
    for _ in range(rng.choice([1, 2, 3])):
        near = max(0, reached - rng.randint(0, 3)) if overlap else reached
        reached = max(reached + 1, near + factor) + rng.randint(0, 7)
        windows[factor] = (near, reached)
        factor *= rng.choice([2, 3, 4])
    return windows


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_every_token_up_to_the_last_window_is_seen_through_accepted_windows(seed: int, overlap: bool) -> None:
    windows = random_windows(random.Random(seed), overlap)
    text = ",".join(f"{factor}x={near}:{far}" for factor, (near, far) in windows.items())
    if all(near >= factor - 1 for factor, (near, _) in windows.items()):
        assert spans(text, overlap) == windows
        assert unseen(windows) == 0
        return
    with pytest.raises(UsageError, match="unfinished"):
        build("retina_lm", {"scale_windows": text, "window_overlap": "allow" if overlap else "forbid"}, dictionary(5))
    # Where windows do not overlap, nothing is refused that has no hole.
    assert overlap or unseen(windows)


def test_the_windows_of_every_preset_are_accepted_and_leave_no_hole() -> None:
    presets = {arch: preset.values for arch, preset in PRESETS.items() if preset.values.get("scale_windows")}
    for arch, values in {**presets, "retina_lm": {"scale_windows": RetinaFlags.scale_windows}}.items():
        overlap = values.get("window_overlap") == "allow"
        assert unseen(spans(str(values["scale_windows"]), overlap)) == 0, arch
