"""Causal windows over rows by torch's flash kernels, on a GPU in half precision.

The kernels have had windows and shared key heads since torch 2.5, but only under private names. So their results are
compared with plain operations once for each device, and they are not used where these differ or arguments have changed.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.ops.recompute import autocast_dtype, refuse_second_derivatives


def _kernel(name: str) -> Callable[..., Any] | None:
    """A kernel of torch's, if there is one of this name."""
    return getattr(getattr(torch.ops.aten, name, None), "default", None)


_forward, _backward = _kernel("_flash_attention_forward"), _kernel("_flash_attention_backward")


def precision(x: Tensor) -> torch.dtype | None:
    """The type in which the kernels would compute for queries x (..., H), or None where they do not run."""
    if not x.is_cuda or torch.version.hip is not None or x.size(-1) > 192 or x.dtype == torch.float64:
        return None
    dtype = autocast_dtype(x.device) or x.dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) and _serves(x.device, dtype) else None


def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on a device, and compute the right numbers."""
    return torch.cuda.get_device_properties(device).major >= 8 and _agrees(device, dtype)


# What torch.compiler.assume_constant_result sets, which would load the compiler with every import of the core.
_serves._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Cases of the comparison: rows, H, window, and whether inputs are float32, as under autocast. The windows lie within
# one of the kernels' tiles, over several, and are open.
_TRIED = (70, 16, 5, False), (300, 64, 150, True), (300, 64, None, True)


@functools.cache
def _agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether windows, with and without sinks, have the results and gradients of masks; warns if not."""
    wrong = ""
    gpus = [device] if device.type == "cuda" else []
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(gpus):
        for (rows, width, window, is_cast), with_sinks in itertools.product(_TRIED, (False, True)):
            try:
                _compare(device, dtype, torch.float32 if is_cast else dtype, rows, width, window, with_sinks)
            except (RuntimeError, AssertionError, ValueError, TypeError) as error:
                wrong = wrong or " ".join(f"{type(error).__name__} {error}".split())[:300]
    if wrong:
        warnings.warn(f"windows do without flash kernels, and are slower: those of {device} gave {wrong}", stacklevel=2)
    return not wrong


def _compare(
    device: torch.device,
    dtype: torch.dtype,
    given: torch.dtype,
    rows: int,
    width: int,
    window: int | None,
    with_sinks: bool,
) -> None:
    """Raise an error unless a window gives what a mask gives, for 4 query heads and 2 key heads in one tensor.

    Results with dropout are linear in the values, so that sum(result * grad) = sum(values * gradient of values) if both
    passes draw the same mask.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, rows, 8 * width), (2,)][: 1 + with_sinks]
    drawn = [torch.randn(shape, generator=generator, device="cpu").to(dtype).float() for shape in shapes]
    inputs = [x.requires_grad_() for x in drawn]
    q, k, v = (x.repeat_interleave(4 // x.size(2), 2).transpose(1, 2) for x in _heads(inputs[0], width))
    row_R = torch.arange(rows, device="cpu")
    distance = row_R[:, None] - row_R
    scores = (q @ k.mT / math.sqrt(width)).masked_fill((distance < 0) | (distance >= (window or rows)), -torch.inf)
    if with_sinks:
        scores = torch.cat([scores, inputs[1].repeat_interleave(2).view(4, 1, 1).expand(2, 4, rows, 1)], dim=-1)
    expected = (scores.softmax(-1)[..., :rows] @ v).transpose(1, 2)
    wanted = torch.autograd.grad(expected, inputs, expected.detach())
    own = [x.detach().to(device, given).requires_grad_() for x in inputs]
    heads = q, k, v = _heads(own[0], width)
    sinks_N = own[1] if with_sinks else None
    found, dropped = (flash_attention(*heads, window, p, sinks_N, dtype) for p in (0.0, 0.5))
    grads = torch.autograd.grad(found, own, expected.detach().to(found))
    (of_values,) = torch.autograd.grad(dropped, v, dropped.detach())
    sums = [(x.float() * y).sum().detach() for x, y in ((dropped, dropped), (v, of_values))]
    assert not torch.equal(found, dropped)
    pairs = zip([found.detach(), *grads, sums[0]], [expected.detach(), *wanted, sums[1].cpu()], strict=True)
    for one, other in pairs:
        # A few roundings of values up to the largest.
        atol = 8.0 * torch.finfo(dtype).eps * max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.float().cpu(), other, rtol=0.0, atol=atol)


def _heads(wide: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of 4 query heads, 2 key heads and 2 value heads, (B, R, 8 * H) -> (B, R, heads, H)."""
    q, k, v = wide.unflatten(-1, (8, width)).split([4, 2, 2], dim=2)
    return q, k, v


def flash_attention(
    q_BRGH: Tensor,
    k_BRKH: Tensor,
    v_BRKH: Tensor,
    width: int | None,
    dropout: float,
    sinks_N: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Causal attention of row r to rows r - width + 1 .. r, or to all up to r if width is None: (B, R, G, H).

    G / K consecutive queries share a key head. ``sinks`` are as in ``attention.attend``.
    """
    scale, more = 1.0 / math.sqrt(q_BRGH.size(-1)), -q_BRGH.size(-1) % 8
    # The kernels want contiguous channels, a multiple of eight.
    own = (F.pad(x.to(dtype), (0, more)) if more else x.to(dtype) for x in (q_BRGH, k_BRKH, v_BRKH))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in own)
    # Both ends are inclusive.
    window = {} if width is None else {"window_size_left": width - 1, "window_size_right": 0}
    options = {"scale": scale, **window}
    if sinks_N is None:
        y = _run(q, k, v, dropout, options)[0]
    else:
        y = _WithSinks.apply(q, k, v, sinks_N.repeat_interleave(q.size(2) // len(sinks_N)), dropout, options)
    return y[..., : q_BRGH.size(-1)]


def _run(q: Tensor, k: Tensor, v: Tensor, dropout: float, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """The result, the log-sum-exp of scores (B, G, R), two states of the generator, and an empty mask."""
    assert _forward is not None
    results: tuple[Tensor, ...] = _forward(q, k, v, None, None, q.size(1), k.size(1), dropout, True, False, **options)
    return results


class _WithSinks(torch.autograd.Function):
    """The kernels' attention with one more key for each head, with a score of its own and a value of zero.

    Let L be a row's log-sum-exp and s the sink's score. With the sink it is L' = log(exp(L) + exp(s)), and the result
    is the kernel's times exp(L - L'). The kernel's gradients of scores are P (dP - sum(grad * out)), P = exp(S - L):
    given L' and the new result, they are those of the larger softmax. The sink has P = exp(s - L') and dP = 0.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, sinks_G: Tensor, dropout: float, options: dict[str, Any]):
        out_BRGH, sums_BGR, *states, _ = _run(q, k, v, dropout, options)
        more_BGR = torch.logaddexp(sums_BGR, sinks_G.to(sums_BGR.dtype).unsqueeze(1))
        out_BRGH = out_BRGH * (sums_BGR - more_BGR).exp().transpose(1, 2).unsqueeze(-1).to(out_BRGH.dtype)
        ctx.dropout, ctx.options = dropout, options
        ctx.save_for_backward(q, k, v, sinks_G, out_BRGH, more_BGR, *states)
        return out_BRGH

    @staticmethod
    def backward(ctx, grad_BRGH: Tensor):
        refuse_second_derivatives("attention with sinks on a GPU")
        q, k, v, sinks_G, out_BRGH, more_BGR, *states = ctx.saved_tensors
        lengths = None, None, q.size(1), k.size(1), ctx.dropout, True
        # The kernel reads these as they lie in memory.
        grad_BRGH, sums_BGR = grad_BRGH.contiguous(), more_BGR.contiguous()
        assert _backward is not None
        grads = _backward(grad_BRGH, q, k, v, out_BRGH, sums_BGR, *lengths, *states, **ctx.options)
        taken_BGR = (grad_BRGH * out_BRGH).sum(-1, dtype=sums_BGR.dtype).transpose(1, 2)
        grad_sinks_G = -(taken_BGR * (sinks_G.to(sums_BGR.dtype).unsqueeze(1) - sums_BGR).exp()).sum((0, 2))
        return *grads, grad_sinks_G.to(sinks_G.dtype), None, None
