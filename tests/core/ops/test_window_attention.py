"""``window_attention`` against its naive twin: outputs and gradients, at any length, through any window."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_ms.core.ops import attention as module
from fairseq_ms.core.ops import flash_windows, window_attention
from fairseq_ms.core.scales import Scale
from fairseq_ms.tools.saved_bytes import saved_bytes
from tests.core.ops import flash_kernels, naive
from tests.helpers.gradients import assert_same_with_gradients, gradients
from tests.helpers.seeds import seeds

attention = window_attention.window_attention
LENGTHS = [1, 2, 3, 7, 8, 31, 32, 33, 64, 65, 100, 197, 330, 600]


def random_window(rng: random.Random) -> tuple[int, int, int | None]:
    k = rng.choice([1, 1, 2, 3, 4, 8, 16, 128])
    near = k * rng.choice([1, 1, 2, 5]) if k > 1 else rng.choice([0, 0, 0, 3])
    return k, near, rng.choice([None, *(near + k * width for width in (1, 2, 7, 30, 64, 300))])


def use_twins_of_flash_kernels(monkeypatch) -> None:
    """As if they served here, in the type of the queries."""
    monkeypatch.setattr(window_attention, "precision", lambda x: x.dtype)
    monkeypatch.setattr(flash_windows, "_forward", flash_kernels.forward)
    monkeypatch.setattr(flash_windows, "_backward", flash_kernels.backward)


def heads(
    length: int, factor: int, width: int = 4, dtype: torch.dtype = torch.float64, key_heads: int = 3
) -> list[Tensor]:
    """Queries, keys and values of 2 rows, 3 heads of queries and so many of keys; those of a position side by side."""
    shapes = [(2, length, 3, width), *2 * [(2, length // factor, key_heads, width)]]
    return [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("seed", seeds(25, 150))
@pytest.mark.parametrize("way", [way + sinks for way in ("again", "kept", "flash") for sinks in ("", ", sinks")])
def test_outputs_and_gradients_are_those_of_the_naive_twin(way: str, seed: int, monkeypatch) -> None:
    rng = random.Random(seed)
    if "flash" in way:
        use_twins_of_flash_kernels(monkeypatch)
    length, (factor, near, far) = rng.choice(LENGTHS), random_window(rng)
    inputs = q, k, v = heads(length, factor, key_heads=rng.choice([3, 1]))
    # One of them as good as none.
    sinks = torch.tensor([-40.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True) if "sinks" in way else None
    scale = Scale(factor, near=near, far=far)
    found = window_attention.attend_window(scale, q, k, v, recompute="again" in way, sinks_N=sinks).transpose(1, 2)
    expected = naive.window_attention(q, k, v, factor, near, far, sinks_N=sinks)
    assert_same_with_gradients(found, expected, [*inputs, *([] if sinks is None else [sinks])], 1e-10)


@pytest.mark.cpu
@pytest.mark.parametrize("window", [(1, 0, 16), (4, 8, 24), (4, 8, None)])
def test_nothing_but_queries_keys_and_values_is_kept(window: tuple[int, int, int | None]) -> None:
    inputs = q, k, v = heads(200, window[0])
    assert saved_bytes(lambda: attention(q, k, v, *window)) == sum(x.nbytes for x in inputs)


@pytest.mark.cpu
@pytest.mark.parametrize("seed", range(12))
def test_dropout_has_the_same_mask_forward_and_backward(seed: int) -> None:
    rng = random.Random(seed)
    length, (factor, near, far) = rng.choice([40, 131, 200]), random_window(rng)
    near, far = (0, 40) if factor > 16 else (near, far)
    factor = 1 if factor > 16 else factor
    blocks = length // factor
    # Of zeros, every key weighs the same, and values say by which key they are: what is kept is read off the result.
    nothing, by_key = torch.zeros(2, 3, length, blocks), torch.eye(blocks).expand(2, 3, blocks, blocks)
    torch.manual_seed(seed)
    kept = attention(nothing, torch.zeros_like(by_key), by_key, factor, near, far, dropout=0.3) != 0.0
    q, k, v = heads(length, factor)
    torch.manual_seed(seed)
    found = attention(q, k, v, factor, near, far, dropout=0.3)
    expected = naive.window_attention(q, k, v, factor, near, far, kept.double(), 0.7)
    assert_same_with_gradients(found, expected, [q, k, v], 1e-10)
    sees = Scale(factor, near=near, far=far).visible(torch.arange(length)[:, None], torch.arange(blocks))
    assert not (kept & ~sees).any()
    assert not sees.any() or 0.5 < kept[..., sees].double().mean() < 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [(1, 0, 8), (4, 8, 64), (1, 0, None), (16, 32, None)])
def test_half_precision_is_near_the_twin_in_double(window: tuple[int, int, int | None], dtype: torch.dtype) -> None:
    """By flash kernels with ``--device cuda``, by blocks of queries on a CPU."""
    inputs = heads(150, window[0], 16, dtype)
    assert (flash_windows.precision(inputs[0]) is not None) == inputs[0].is_cuda
    precise = [x.detach().double().requires_grad_() for x in inputs]
    (q, k, v), (q_64, k_64, v_64) = inputs, precise
    found, expected = attention(q, k, v, *window), naive.window_attention(q_64, k_64, v_64, *window)
    pairs = zip([found, *gradients(found, inputs)], [expected, *gradients(expected, precise)])
    for one, other in pairs:
        # A few roundings, to 8 bits or to 11, of values up to the largest.
        atol = 3.0 * torch.finfo(dtype).eps * max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=atol)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_this_torch_has_the_flash_kernels_that_are_called(with_sinks: bool, monkeypatch) -> None:
    """With their own shapes and gradients, on a device that computes nothing."""
    q, k, v = (x.detach().to("meta", torch.bfloat16).requires_grad_() for x in heads(70, 4, 12))
    sinks = torch.zeros(3, device="meta", requires_grad=True) if with_sinks else None
    monkeypatch.setattr(window_attention, "precision", lambda x: x.dtype)
    window_attention.attend_window(Scale(4, near=8, far=24), q, k, v, 0.1, sinks_N=sinks).sum().backward()
    assert all(x.grad is not None for x in (q, k, v, *([sinks] if sinks is not None else [])))
    assert flash_windows._kernel("not_there") is None


@pytest.mark.cpu
@pytest.mark.parametrize(
    "wrong",
    [
        *("nothing", "window", "wide window", "no window", "gradients of sinks", "no kernel", "arguments", "seed"),
        *("dropout", "strides", "long texts", "wide heads"),
    ],
)
def test_kernels_are_compared_before_they_are_used(wrong: str, monkeypatch, recwarn) -> None:
    wide = {"window": 4, "wide window": 149, "no window": None}

    def forward(*args: Any, **named: Any) -> tuple[Tensor, ...]:
        if wrong == "no kernel":
            raise RuntimeError("no kernel image is available")
        if wrong == "arguments":
            args = args[1:]
        if wrong == "dropout":
            args = (*args[:7], 0.0, *args[8:])
        left = named.pop("window_size_left", None)
        wider = wrong in ("window", "no window", "wide window") and left == wide[wrong]
        named |= {} if left is None and not wider else {"window_size_left": (left or 200) + wider}
        q, k, v, *rest = args
        if wrong == "strides":
            v = v.reshape(-1).as_strided(v.shape, v.contiguous().stride()) if v.is_contiguous() else torch.zeros_like(v)
        if (wrong == "long texts" and q.size(1) > 128) or (wrong == "wide heads" and q.size(3) > 32):
            k = k.roll(1, 1)
        return flash_kernels.forward(q, k, v, *rest, **named)

    def backward(*args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        args = (*args[:5], args[5] + 0.5, *args[6:]) if "sinks" in wrong else args
        args = (*args[:12], args[12] + 1, *args[13:]) if wrong == "seed" else args
        return flash_kernels.backward(*args, **named)

    monkeypatch.setattr(flash_windows, "_forward", forward)
    monkeypatch.setattr(flash_windows, "_backward", backward)
    found = flash_windows._agrees.__wrapped__(torch.device("cpu"), torch.bfloat16)
    assert found == (wrong == "nothing")
    assert [str(warning.message).startswith("windows do without flash") for warning in recwarn] == [True] * (not found)


@pytest.mark.cpu
def test_a_compiled_model_asks_once_whether_kernels_serve(monkeypatch) -> None:
    asked: list[torch.dtype] = []

    def agrees(device: torch.device, dtype: torch.dtype) -> bool:
        asked.append(dtype)
        return True

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9))
    monkeypatch.setattr(flash_windows, "_agrees", agrees)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def chosen(x: Tensor) -> Tensor:
        return x * 2 if flash_windows._serves(x.device, x.dtype) else x

    assert torch.equal(chosen(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(chosen(torch.ones(3)), torch.full((3,), 2.0))
    assert asked == [torch.float32]


def test_kernels_are_tried_under_a_checkpoint_too() -> None:
    module._shares.cache_clear()
    inputs = q, k, v = heads(20, 2)
    found, expected = attention(q, k, v, 2, 2), naive.window_attention(q, k, v, 2, 2)
    assert_same_with_gradients(found, expected, inputs, 1e-10)


def test_a_hidden_key_that_is_not_finite_has_no_gradient() -> None:
    """Beyond the windows of all queries nothing is read."""
    q, k, v = heads(20, 4)
    with torch.no_grad():
        k[:, :, -1] = v[:, :, -1] = torch.nan
    attention(q, k, v, 4, 8, 16).sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    assert k.grad is not None
    assert not k.grad[:, :, -1].any()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(({"factor": 4, "near": near, "far": far}, "near and far must") for near, far in ((3, 8), (6, 16), (4, 10))),
        *(({"near": near, "far": far}, "near and far must") for near, far in ((4, 4), (-1, 4), (0, 0))),
        ({"k": torch.zeros(2, 3, 19, 4)}, "q must be"),
        ({"v": torch.zeros(2, 3, 20, 5)}, "q must be"),
        ({"q": torch.zeros(20, 3, 4)}, "q must be"),
        ({"factor": 2, "near": 2}, "q must be"),
        *(({"factor": factor}, "factor must be") for factor in (0, -2, 1.0)),
        *(({"far": far, "near": near}, "near and far must") for near, far in ((0, 4.0), (1.5, 4))),
        *(({"dropout": dropout}, "dropout must be") for dropout in (-0.1, 1.0, 2.0)),
    ],
)
def test_other_bounds_and_shapes_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        attention(**{**dict(zip("qkv", heads(20, 1))), **change})
