"""Attention through a window over blocks of tokens, at a cost linear in the number of tokens.

The keys of scale k are blocks of k tokens. Query t sees block j iff it is finished and its first token lies in the
window, near <= t - j k < far (Multi-scale Transformer LMs, Section 3.4, Figure 1e). With near and far multiples of k,
the k queries of a row see the same blocks: after the first ``near`` queries, which see none, row r sees the blocks
r - w + 1 .. r, with w = (far - near) / k. So a window over blocks is a causal window over rows of k queries::

    k = 2, window 2:6 (w = 2)      blocks    0 1 2 3
        t = 0, 1                             . . . .      zero
        t = 2, 3                   row 0     x . . .
        t = 4, 5                   row 1     x x . .
        t = 6, 7                   row 2     . x x .

On a GPU, in half precision, torch's flash kernels compute that (``flash_windows``). Elsewhere, an open window is full
attention over rows, and for a closed one, some rows at a time attend to a slice of the blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.ops.attention import attend, visible
from fairseq_ms.core.ops.flash_windows import flash_attention, precision
from fairseq_ms.core.ops.recompute import check_probability, checkpointed, keep_in_graph, saves
from fairseq_ms.core.scales import Scale, check_window

# At least so many queries share a slice of keys, the latter in windows of at most as many tokens.
_QUERY_BLOCK, _NARROW_BLOCK = 64, 32


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, factor: int = 1, near: int = 0, far: int | None = None, dropout: float = 0.0
) -> Tensor:
    """Attention to blocks of ``factor`` tokens through the window near:far, (B, N, T, H); zero where a query sees none.

    Query t sees the blocks j with near <= t - j * factor < far. The cost grows with T and the width of the window.
    ``window_attention`` of ``tests/core/ops/naive.py`` is the same in a few lines.

    Args:
        q: queries (B, N, T, H), from the beginning of texts
        k: keys of the finished blocks, (B, N, T // factor, H)
        v: their values
        factor: tokens of a block
        near: in tokens, a multiple of ``factor``, and at least ``factor`` for blocks, since the newest is unfinished
        far: in tokens, a multiple of ``factor``; None for an open window
        dropout: probability of dropping an attention weight

    Raises ValueError for other numbers and other shapes.
    """
    if not isinstance(factor, int) or factor < 1:
        raise ValueError(f"factor must be a whole number of at least 1: got {factor}")
    check_probability("dropout", dropout)
    scale = Scale(factor, near=near, far=far)
    check_window(scale, "near and far")
    wanted = (*q.shape[:2], q.size(2) // factor, q.size(3)) if q.dim() == 4 else None
    if wanted is None or k.shape != wanted or v.shape != wanted:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q must be (B, N, T, H), k and v (B, N, T // {factor}, H): got {shapes}")
    return attend_window(scale, q, k, v, dropout).transpose(1, 2)


def attend_blocks(
    bounds: tuple[int, int, int],
    q_BNTH: Tensor,
    k_BKCH: Tensor,
    v_BKCH: Tensor,
    dropout: float = 0.0,
    recompute: bool = False,
    sinks_N: Tensor | None = None,
    start: int = 0,
    oldest: int = 0,
) -> Tensor:
    """Attention of queries at positions from ``start`` on to blocks from number ``oldest`` on, (B, N, T, H).

    ``bounds`` are those of ``visible``. The result is zero for queries before the first that sees a block.
    """
    (factor, nearest, end), length, device = bounds, q_BNTH.size(2), q_BNTH.device
    blind = max(oldest * factor + nearest - start, 0)
    if blind >= length:
        # Zeros that still lead back to the queries: distributed training waits for every gradient.
        return F.pad(q_BNTH[:, :, :0], (0, 0, length, 0))
    first, last = max(oldest, (start + blind - end) // factor + 1), (start + length - 1 - nearest) // factor
    k, v = (x[:, :, first - oldest : last + 1 - oldest] for x in (k_BKCH, v_BKCH))
    bias = None
    if length > 1:
        queries = torch.arange(start + blind, start + length, device=device)[:, None]
        seen = visible(queries, torch.arange(first, last + 1, device=device), *bounds)
        bias = q_BNTH.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    y_BNTH = attend(q_BNTH[:, :, blind:], k, v, bias, False, dropout, recompute, sinks_N)
    return F.pad(y_BNTH, (0, 0, blind, 0)) if blind else y_BNTH


def attend_window(
    scale: Scale,
    q_BNTH: Tensor,
    k_BKCH: Tensor,
    v_BKCH: Tensor,
    dropout: float = 0.0,
    recompute: bool = True,
    sinks_N: Tensor | None = None,
    start: int = 0,
    oldest: int = 0,
) -> Tensor:
    """``window_attention`` of a scale's window, (B, T, N, H); ``recompute`` and ``sinks_N`` as in ``attend``.

    Keys and values may have K heads, each shared by N / K consecutive query heads. In a text that goes on, queries are
    at positions from ``start`` on, and blocks are those from number ``oldest`` on.
    With ``recompute``, only queries, keys and values are kept for backward, unless a window over tokens sees them all.
    """
    if start:
        y_BNTH = attend_blocks(scale.bounds, q_BNTH, k_BKCH, v_BKCH, dropout, recompute, sinks_N, start, oldest)
        return y_BNTH.transpose(1, 2)
    length, near, factor = q_BNTH.size(2), scale.near, scale.factor
    # Not ``max``, nor below a quotient under 0, with which compilers take far longer where T is symbolic.
    queries = length - near if length > near else 0
    if not queries:
        # Zeros that still lead back to all parameters: distributed training waits for every gradient.
        inputs = [q_BNTH, k_BKCH, v_BKCH, *([] if sinks_N is None else [sinks_N])]
        return keep_in_graph(torch.zeros_like(q_BNTH), inputs).transpose(1, 2)
    rows = (queries + factor - 1) // factor
    seen = q_BNTH[:, :, near:], k_BKCH[:, :, :rows], v_BKCH[:, :, :rows]
    flash = precision(q_BNTH)
    width = None if scale.far is None else (scale.far - near) // factor
    # Causal attention to everything is left to torch, which chooses a kernel.
    if flash is not None and not (factor == 1 and width is None and sinks_N is None):
        y_BTNH = _by_flash(*seen, factor, width, dropout, sinks_N, flash)
    else:
        again = recompute and saves() and not (factor == 1 and (width is None or width >= rows))
        y_BTNH = checkpointed(_by_rows, *seen, factor, width, dropout, recompute, sinks_N, enabled=again)
    return F.pad(y_BTNH, (0, 0, 0, 0, near, 0)) if near else y_BTNH


def _by_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: int,
    width: int | None,
    dropout: float,
    sinks_N: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Attention of the queries of row r to blocks r - width + 1 .. r, (B, T, N, H), by flash kernels."""
    rows_BRNkH = _split_rows(q, factor)
    keys = k.transpose(1, 2), v.transpose(1, 2)
    y_BRGH = flash_attention(rows_BRNkH.flatten(2, 3), *keys, width, dropout, sinks_N, dtype)
    return _join_rows(y_BRGH.view(rows_BRNkH.shape), q.size(2))


def _by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: int,
    width: int | None,
    dropout: float,
    recompute: bool,
    sinks_N: Tensor | None,
) -> Tensor:
    """As ``_by_flash``, by operations that every device has."""
    rows_BRNkH = _split_rows(q, factor)
    batch, rows, heads = rows_BRNkH.shape[:3]
    sinks_G = sinks_N if sinks_N is None or factor == 1 else sinks_N.repeat_interleave(factor)
    if width is None or width >= rows:
        # The k queries of a row become heads.
        y_BGRH = attend(rows_BRNkH.flatten(2, 3).transpose(1, 2), k, v, None, True, dropout, recompute, sinks_G)
        return _join_rows(y_BGRH.transpose(1, 2).unflatten(2, (heads, factor)), q.size(2))
    least = _NARROW_BLOCK if width * factor <= _NARROW_BLOCK else _QUERY_BLOCK
    # At most five times as many keys are copied as there are.
    step = max(-(-least // factor), -(-width // 4))
    blocks, span = (rows + step - 1) // step, step + width - 1
    # A key head has G = N / K * k queries a row; (B * K, blocks) takes the place of batch and heads:
    # (B, R, N, k, H) -> (B, blocks, step, K, G, H) -> (B * K, blocks, step * G, H)
    group = heads // k.size(1) * factor
    shape = k.size(1), group
    padded = F.pad(rows_BRNkH.flatten(2, 3), (0, 0, 0, 0, 0, blocks * step - rows)).unflatten(1, (blocks, step))
    own = padded.unflatten(3, shape).permute(0, 3, 1, 2, 4, 5).flatten(3, 4).flatten(0, 1)
    # Slices of keys, from ``width - 1`` before a block's first row on: (B * K, blocks, span, H)
    sliced = [F.pad(x, (0, 0, width - 1, blocks * step - rows)).flatten(0, 1) for x in (k, v)]
    k, v = (x.unfold(1, span, step).transpose(-1, -2) for x in sliced)
    bias = _band(blocks, step, group, width, q)
    # One for each of a block's queries: (N * k,) -> (B * K, 1, step * G)
    sinks = None if sinks_G is None else sinks_G.view(shape).repeat(batch, step).unsqueeze(1)
    y = attend(own, k, v, bias, False, dropout, recompute, sinks)
    y_BRKGH = y.unflatten(0, (batch, shape[0])).unflatten(3, (step, group)).flatten(2, 3).transpose(1, 2)
    return _join_rows(y_BRKGH.flatten(2, 3).unflatten(2, (heads, factor)), q.size(2))


def _band(blocks: int, step: int, group: int, width: int, like: Tensor) -> Tensor:
    """The bias for each block of ``step`` rows of ``group`` queries; keys begin ``width - 1`` before the first row."""
    row_J1 = torch.arange(step * group, device=like.device)[:, None] // group
    key_S = torch.arange(step + width - 1, device=like.device)
    first_X11 = width - 1 - torch.arange(blocks, device=like.device)[:, None, None] * step
    hidden_XJS = (key_S < row_J1) | (key_S >= row_J1 + width) | (key_S < first_X11)
    return like.new_zeros(hidden_XJS.shape).masked_fill_(hidden_XJS, -torch.inf)


def _split_rows(q_BNTH: Tensor, factor: int) -> Tensor:
    """Split queries into rows of k, (B, R, N, k, H), with zeros at the end."""
    q_BTNH = q_BNTH.transpose(1, 2)
    if factor == 1:
        return q_BTNH.unsqueeze(3)
    rows = (q_BTNH.size(1) + factor - 1) // factor
    padded = F.pad(q_BTNH, (0, 0, 0, 0, 0, rows * factor - q_BTNH.size(1)))
    return padded.unflatten(1, (rows, factor)).transpose(2, 3)


def _join_rows(y_BRNkH: Tensor, length: int) -> Tensor:
    """The inverse of ``_split_rows``: (B, T, N, H)."""
    return y_BRNkH.transpose(2, 3).flatten(1, 2)[:, :length]
