"""Rotary positions against complex numbers, and what they cost."""

from typing import Any

import pytest
import torch

from fairseq_ms.core import Scale
from fairseq_ms.core.ops.rotary import rotate, rotation
from fairseq_ms.tools.saved_bytes import saved_bytes
from tests.core.ops import naive
from tests.core.test_model import build
from tests.helpers.gradients import assert_same_with_gradients


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


MODELS: dict[str, dict[str, Any]] = {
    "Vanilla": {"layers": 3},
    "Retina": {"layers": 3, "scales": (Scale(1, far=8), Scale(4, near=8, far=24))},
    "TopDown": {"scales": (Scale(1, 2), Scale(4, 2))},
    "BottomUp": {"scales": (Scale(1, 2), Scale(4, 2))},
    "CoarseLM": {"scale": Scale(4, 3)},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_training_step_keeps_the_angles_once_and_nothing_else_for_rotary_positions(name: str, dropout: float) -> None:
    sizes = {"dim": 32, "ffn_dim": 40, "heads": 4, "dropout": dropout, "attention_dropout": dropout, **MODELS[name]}
    tokens, kept = torch.randint(11, (3, 37)), {}
    for positions in ("none", "rotary"):
        model = build(name, **sizes, positions=positions).train()
        kept[positions] = saved_bytes(lambda model=model: model(tokens)[0], model)
    # cos and sin of 4 pairs of channels, in float32.
    blocks = {"Vanilla": 37, "Retina": 37 + 9, "TopDown": 37 + 10, "CoarseLM": 10}
    # Bottom-up: for its two stacks, and for the queries and blocks of the aggregation between them.
    positions_kept = blocks.get(name, 2 * (37 + 9))
    assert kept["rotary"] - kept["none"] == 4 * 2 * 4 * positions_kept
