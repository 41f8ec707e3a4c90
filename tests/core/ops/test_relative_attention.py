"""The relative shift, its sinusoids and its mask, number by number."""

import math

import pytest
import torch

from fairseq_ms.core.ops.relative_attention import Sinusoids, hide_future, rel_shift, sinusoids


@pytest.mark.parametrize("outer", [(), (3,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 6), (4, 4), (3, 8)])
def test_every_score_moves_from_the_column_of_its_distance_to_that_of_its_key(
    queries: int, keys: int, outer: tuple[int, ...]
) -> None:
    scores = torch.randn(*outer, queries, keys + 1)
    shifted = rel_shift(scores, keys)
    assert shifted.shape == (*outer, queries, keys)
    for query in range(queries):
        position = keys - queries + query
        for key in range(position + 1):
            # Columns are distances keys - 1, keys - 2, ..., 0, -1.
            column = keys - 1 - (position - key)
            assert torch.equal(shifted[..., query, key], scores[..., query, column])
    assert shifted.untyped_storage().data_ptr() == scores.untyped_storage().data_ptr(), "nothing is copied"


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 6), (4, 4), (3, 8)])
def test_keys_behind_their_query_are_hidden_and_no_others(queries: int, keys: int) -> None:
    hidden = hide_future(torch.zeros(2, queries, keys))
    for query in range(queries):
        position = keys - queries + query
        assert hidden[:, query].tolist() == [[0.0 if key <= position else -math.inf for key in range(keys)]] * 2


@pytest.mark.parametrize("dim", [1, 2, 5, 8])
def test_sinusoids_are_those_of_the_distances_farthest_first(dim: int) -> None:
    table = sinusoids(6, dim, torch.empty(0, dtype=torch.float64))
    assert table.shape == (7, dim)
    waves = -(-dim // 2)
    for row, distance in enumerate((5, 4, 3, 2, 1, 0, -1)):
        angles = [distance / 10000 ** (2 * wave / dim) for wave in range(waves)]
        expected = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        # float64: powers and sines of two libraries.
        torch.testing.assert_close(table[row], torch.tensor(expected[:dim], dtype=torch.float64), rtol=0.0, atol=1e-14)


def test_a_table_for_fewer_keys_is_the_end_of_the_longer_one() -> None:
    like = torch.empty(0, dtype=torch.float64)
    kept = Sinusoids(4)
    longest = kept(9, like)
    for keys in (9, 5, 1):
        # The same angles in float64, at another place of a vector: a unit in the last place of numbers up to 1.
        torch.testing.assert_close(kept(keys, like), sinusoids(keys, 4, like), rtol=0.0, atol=2.0**-52)
        assert kept(keys, like).untyped_storage().data_ptr() == longest.untyped_storage().data_ptr()
    assert torch.equal(kept(10, like), sinusoids(10, 4, like))
