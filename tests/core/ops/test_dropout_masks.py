"""Dropout masks of attention through windows, read off the results, are independent draws wherever one looks."""

import torch

from fairseq_ms.core.ops.recompute import Dropout
from fairseq_ms.core.ops.window_attention import window_attention

P = 0.3


def dropped_streams(groups: int, rows: int, blocks: int, queries: int, window: int, keys: int) -> torch.Tensor:
    """The masks as one row of bits for every group, row of the batch, head and block of ``queries``: (streams, bits).

    Scores are zero and every value says by which key it is, modulo ``window``, so the result of a query shows in
    ``window`` columns which of the keys it sees it has kept. All of it is the same in every group and row. The first
    block, whose queries see fewer keys, is left out, and all but the first ``keys`` columns.
    """
    heads, head_dim, length = 2, window, blocks * queries
    nothing = torch.zeros(rows, heads, length, head_dim, requires_grad=True)
    values = torch.eye(head_dim)[torch.arange(length) % head_dim].expand_as(nothing)
    out = torch.stack([window_attention(nothing, nothing, values, far=window, dropout=P) for _ in range(groups)])
    # (groups, B, N, T, H) -> (groups, B, blocks, Q, N, H)
    out = out.unflatten(3, (blocks, queries)).permute(0, 1, 3, 4, 2, 5)
    kept = (out[..., :keys] != 0.0).double()
    # -> (groups * B * blocks * N, Q * keys)
    return kept[:, :, 1:].transpose(3, 4).flatten(4).flatten(0, 3)


def assert_independent(streams: torch.Tensor) -> None:
    """Bits that are 1 with probability 1 - P, no two rows of which go together."""
    bits = streams.size(1)
    share = 1.0 - P
    # Six standard deviations, of the mean of all and of each of a few million correlations.
    assert abs(streams.mean().item() - share) < 6.0 * (share * P / streams.numel()) ** 0.5
    centred = (streams - share) / (share * P) ** 0.5
    together = (centred @ centred.t() / bits).fill_diagonal_(0.0)
    assert together.abs().max() < 6.0 / bits**0.5


def test_masks_of_groups_rows_heads_and_blocks_are_uncorrelated() -> None:
    # More rows than fit into eight bits.
    assert_independent(dropped_streams(groups=2, rows=258, blocks=3, queries=32, window=32, keys=32))


def test_masks_of_chunks_are_uncorrelated() -> None:
    # A window as long as the sequence, which is worked through in chunks of 64 queries.
    assert_independent(dropped_streams(groups=2, rows=9, blocks=4, queries=64, window=256, keys=64))


def test_masks_of_successive_layers_are_uncorrelated() -> None:
    torch.manual_seed(3)
    assert_independent(torch.stack([(Dropout(P)(torch.ones(4000)) != 0.0).double() for _ in range(200)]))
