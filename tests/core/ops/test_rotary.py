"""Rotary positions against complex numbers, and what they cost."""

from typing import Any

import pytest
import torch

from fairseq_ms.core.ops import naive
from fairseq_ms.core.ops.rotary import rotate, rotation
from fairseq_ms.tools.saved_bytes import saved_bytes
from tests.helpers.gradients import assert_same_with_gradients
from tests.registry import build, dictionary


@pytest.mark.parametrize("positions", [range(1), range(13), range(40, 47), range(15, 60, 5), range(10**6, 10**6 + 3)])
@pytest.mark.parametrize(("heads", "head_dim", "width"), [(1, 2, 2), (3, 6, 18), (2, 4, 13)])
def test_rotation_equals_complex_numbers_in_outputs_and_gradients(
    positions: range, heads: int, head_dim: int, width: int
) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, len(positions), width, dtype=torch.float64, requires_grad=True)
    fast = rotate(x, rotation(positions, head_dim, 50.0, x), heads)
    slow = naive.rotate(x, positions, heads, head_dim, 50.0)
    assert_same_with_gradients(fast, slow, [x], 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_angles_are_exact_far_out_and_applied_in_the_type_of_the_input(dtype: torch.dtype) -> None:
    far = range(10**6, 10**6 + 2)
    x = torch.randn(1, 2, 8).to(dtype)
    angles = rotation(far, 8, 1e4, x)
    assert angles.dtype == torch.float32
    torch.testing.assert_close(angles.double(), rotation(far, 8, 1e4, x.double()), rtol=0.0, atol=1e-7)
    assert rotate(x, angles, 1).dtype == dtype


ARCHS: dict[str, dict[str, Any]] = {
    "vanilla_lm": {"decoder_layers": 3},
    "retina_lm": {"decoder_layers": 3, "scale_windows": "1x=0:8,4x=8:24"},
    "multiscale_topdown": {"scale_layers": "4x=2,1x=2"},
    "multiscale_bottomup": {"scale_layers": "4x=2,1x=2"},
    "coarse_lm": {"scale_layers": "4x=3"},
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_training_step_keeps_the_angles_once_and_nothing_else_for_rotary_positions(arch: str, dropout: float) -> None:
    sizes = {"decoder_embed_dim": 32, "decoder_ffn_embed_dim": 40, "decoder_attention_heads": 4}
    tokens, kept = torch.randint(4, 13, (3, 37)), {}
    for positions in ("none", "rotary"):
        flags = {**sizes, **ARCHS[arch], "positions": positions, "dropout": dropout, "attention_dropout": dropout}
        model = build(arch, flags, dictionary(9)).train()
        kept[positions] = saved_bytes(lambda model=model: model(tokens)[0], model)
    # cos and sin of 4 pairs of channels, in float32.
    blocks = {"vanilla_lm": 37, "retina_lm": 37 + 9, "multiscale_topdown": 37 + 10, "coarse_lm": 10}
    # Bottom-up: for its two stacks, and for the queries and blocks of the aggregation between them.
    positions_kept = blocks.get(arch, 2 * (37 + 9))
    assert kept["rotary"] - kept["none"] == 4 * 2 * 4 * positions_kept
