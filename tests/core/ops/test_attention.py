"""Attention against the formula, written out."""

import pytest
import torch
from torch import nn

from fairseq_ms.core.config import LayerConfig
from fairseq_ms.core.layers import SelfAttention
from fairseq_ms.core.ops import attention as module
from fairseq_ms.core.ops.attention import attend, merge_heads, split_qkv
from fairseq_ms.tools.saved_bytes import saved_bytes
from tests.core.ops import naive
from tests.helpers.gradients import assert_same_with_gradients
from tests.helpers.torch_versions import not_oldest

either = pytest.mark.parametrize("sinks", [False, True])


def tensors(queries: int, keys: int, key_heads: int = 3) -> list[torch.Tensor]:
    shapes = [(2, 3, queries, 5), (2, key_heads, keys, 5), (2, key_heads, keys, 5)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def scores(sinks: bool) -> torch.Tensor | None:
    """Of the sinks of three heads, one of them as good as none."""
    given = torch.tensor([-40.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    return given if sinks else None


def masks_of(monkeypatch) -> list[torch.Tensor]:
    """The dropout masks as they are drawn, in forward and again in backward."""
    drawn: list[torch.Tensor] = []
    draw_mask = module.draw_mask

    def spy(p, like):
        mask = draw_mask(p, like)
        drawn.append((mask != 0.0).to(like.dtype))
        return mask

    monkeypatch.setattr(module, "draw_mask", spy)
    return drawn


def by_query(drawn: list[torch.Tensor], chunks: int, queries: int) -> list[torch.Tensor]:
    """Masks of chunks, (B, N, rows, S) each, as one (B, N, S) a query."""
    rows = [mask[:, :, t] for mask in drawn[:chunks] for t in range(mask.size(2))]
    assert len(rows) == queries
    return rows


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 8), (1, 7), (70, 70), (67, 150)])
@pytest.mark.parametrize("kind", ["causal", "bias", "plain"])
@pytest.mark.parametrize("key_heads", [3, 1])
@either
def test_attention_without_dropout_is_the_formula(
    queries: int, keys: int, kind: str, key_heads: int, sinks: bool
) -> None:
    (q, k, v), causal, sinks_N = tensors(queries, keys, key_heads), kind == "causal", scores(sinks)
    bias = torch.randn(2, 1, queries, keys, dtype=torch.float64) if kind == "bias" else None
    result = attend(q, k, v, bias=bias, causal=causal, sinks_N=sinks_N)
    expected = naive.attention(q, k, v, bias, causal, sinks_N=sinks_N)
    assert_same_with_gradients(result, expected, [q, k, v, *([] if sinks_N is None else [sinks_N])], 1e-10)


@pytest.mark.cpu
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 8), (70, 70), (67, 150)])
@pytest.mark.parametrize("kind", ["causal", "bias", "row bias", "plain"])
@pytest.mark.parametrize("key_heads", [3, 1])
@either
def test_attention_with_dropout_is_the_formula_with_the_same_mask(
    queries: int, keys: int, kind: str, key_heads: int, sinks: bool, monkeypatch
) -> None:
    (q, k, v), sinks_N = tensors(queries, keys, key_heads), scores(sinks)
    shapes = {"bias": (1, 3, queries, keys), "row bias": (2, 1, 1, keys)}
    bias = torch.randn(shapes[kind], dtype=torch.float64) if kind in shapes else None
    drawn = masks_of(monkeypatch)
    result = attend(q, k, v, bias=bias, causal=kind == "causal", dropout=0.4, sinks_N=sinks_N)
    chunks = -(-queries // module._QUERY_CHUNK)
    assert len(drawn) == chunks
    masks = by_query(drawn, chunks, queries)
    expected = naive.attention(q, k, v, bias, kind == "causal", masks, 0.6, sinks_N)
    assert_same_with_gradients(result, expected, [q, k, v, *([] if sinks_N is None else [sinks_N])], 1e-10)
    for first, again in zip(drawn[:chunks], reversed(drawn[chunks:]), strict=True):
        assert torch.equal(first, again)


def test_heads_of_keys_are_repeated_where_no_kernel_shares_them(monkeypatch) -> None:
    q, k, v = tensors(20, 20, 1)
    shared = attend(q, k, v, causal=True)
    monkeypatch.setattr(module, "_shares", lambda *args: False)
    assert_same_with_gradients(attend(q, k, v, causal=True), shared, [q, k, v])


@pytest.mark.cpu
@not_oldest
def test_this_torch_shares_heads_of_keys_on_a_cpu() -> None:
    """Else it would keep all scores, or copies of keys."""
    q, k, v = tensors(200, 200, 1)
    assert saved_bytes(lambda: attend(q, k, v, causal=True)) <= 2 * q.nbytes + 2 * k.nbytes + q.nbytes // 5


@pytest.mark.cpu
def test_chunks_of_a_sequence_have_masks_of_their_own() -> None:
    nothing = torch.zeros(1, 1, 2 * module._QUERY_CHUNK, 3, requires_grad=True)
    y = attend(nothing, nothing[:, :, :3], torch.eye(3)[None, None], dropout=0.5)
    first, second = y.split(module._QUERY_CHUNK, dim=2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("length", [1, 6, 64, 131])
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.3, marks=pytest.mark.cpu)])
@either
def test_self_attention_is_the_formula(length: int, dropout: float, sinks: bool, monkeypatch) -> None:
    layer = SelfAttention(LayerConfig(dim=15, ffn_dim=1, heads=3, attention_dropout=dropout, sinks=sinks)).double()
    if layer.qk.sinks is not None:
        nn.init.normal_(layer.qk.sinks)
    x = torch.randn(2, length, 15, dtype=torch.float64, requires_grad=True)
    drawn = masks_of(monkeypatch)
    result = layer(x)
    chunks = -(-length // module._QUERY_CHUNK)
    masks = by_query(drawn, chunks, length) if dropout else None
    q, k, v = split_qkv(layer.qkv(layer.norm(x)), 3)
    expected = layer.out(merge_heads(naive.attention(q, k, v, None, True, masks, 1.0 - dropout, layer.qk.sinks)))
    assert_same_with_gradients(result, expected, [x, *layer.parameters()], 1e-10)


@pytest.mark.cpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@either
def test_no_scores_are_kept_and_types_stay(dropout: float, sinks: bool) -> None:
    qkv, sinks_N = torch.randn(2, 200, 144, requires_grad=True), torch.zeros(3) if sinks else None

    def attended(dtype: torch.dtype) -> torch.Tensor:
        torch.manual_seed(3)
        q, k, v = split_qkv(qkv.to(dtype), 3)
        return merge_heads(attend(q, k, v, None, True, dropout, True, None if sinks_N is None else sinks_N.to(dtype)))

    # With dropout, queries, keys and values; else the result, too, and a number a query; sinks take eight more of 16
    # channels, and a key more. All scores are four times as many numbers as there are queries, keys and values.
    most = 1.001 if dropout else 4.2 / 3.0 * (1.51 if sinks else 1.0)
    assert saved_bytes(lambda: attended(torch.float32)) <= most * qkv.nbytes
    results = []
    for dtype in (torch.float32, torch.float64):
        result = attended(dtype)
        results.append((result.double(), torch.autograd.grad(result.square().sum(), qkv)[0]))
    for one, other in zip(*results):
        # float32's rounding of sums of 200 products; bfloat16's is 65,536 times as much.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
