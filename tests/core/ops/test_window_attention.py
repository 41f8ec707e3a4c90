"""How windows are laid out: the slice of a block of queries has the keys that they see, and no other."""

import random

import pytest
import torch

from fairseq_ms.core.ops.window_attention import HeadGroup, Layout


def random_group(rng: random.Random) -> HeadGroup:
    factor, near = rng.choice([1, 2, 3, 4, 8]), rng.choice([0, 1, 5, 16])
    return HeadGroup(factor, near, max(near, factor - 1) + rng.randint(1, 40), 1)


@pytest.mark.parametrize("seed", range(60))
def test_a_slice_has_every_key_that_its_queries_see_and_none_that_they_do_not(seed: int) -> None:
    rng = random.Random(seed)
    group = random_group(rng)
    layout = Layout(group, 600, group.factor * rng.randint(1, 40), torch.get_default_device())
    assert layout.sliced
    visible = group.visible(torch.arange(600)[:, None], torch.arange(layout.keys))
    for block in range(layout.blocks):
        first = block * layout.step - layout.pad_left
        queries = range(block * layout.query_block, min((block + 1) * layout.query_block, 600))
        seen = visible[queries.start : queries.stop].any(0).nonzero().flatten().tolist()
        held = [key for key in range(first, first + layout.span) if 0 <= key < layout.keys]
        if len(queries) == layout.query_block:
            assert held == seen
        else:
            # The last block's slice is as wide as the others'.
            assert set(held) >= set(seen)
    keys_and_padding = layout.pad_left + layout.keys + layout.pad_right
    assert keys_and_padding >= (layout.blocks - 1) * layout.step + layout.span


@pytest.mark.parametrize(("length", "sliced"), [(10, False), (11, True)])
def test_where_a_slice_would_hold_every_key_there_is_a_single_block(length: int, sliced: bool) -> None:
    # Queries 0 .. 3 see keys from -6 to 3.
    layout = Layout(HeadGroup(1, 0, 7, 1), length, 4, torch.get_default_device())
    assert layout.sliced is sliced
    assert (layout.blocks, layout.query_block, layout.span) == ((3, 4, 10) if sliced else (1, 10, 10))
