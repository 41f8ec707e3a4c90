"""What waits for its block to be finished, against the list of everything that came."""

import random

import pytest
import torch
from fairseq_ms.decoding.blocks import RecentTokens, UnfinishedBlock


@pytest.mark.parametrize("seed", range(20))
def test_a_block_is_finished_by_its_last_position_and_holds_what_came_since_the_one_before(seed: int) -> None:
    rng = random.Random(seed)
    factor = rng.choice([1, 2, 3, 5])
    block, everything = UnfinishedBlock(2, factor, torch.empty(0, 0, 3)), torch.empty(2, 0, 3)
    for _ in range(30):
        new = torch.randn(2, rng.choice([0, 1, 1, 2, 3, 11]), 3)
        everything = torch.cat([everything, new], dim=1)
        count = everything.size(1)
        finished = block.push(new)
        assert finished is (new.size(1) > 0 and count % factor == 0)
        held = factor if finished else count % factor
        assert torch.equal(block.buffer[:, :held], everything[:, count - held :])
        order = torch.tensor([rng.randrange(2), rng.randrange(2)])
        block.reorder(order)
        everything = everything[order]


@pytest.mark.parametrize("seed", range(20))
def test_right_aligned_blocks_are_made_of_the_last_tokens_and_of_padding_before_the_first(seed: int) -> None:
    rng = random.Random(seed)
    span, padding = rng.choice([1, 4, 12]), rng.choice([0.0, -torch.inf])
    recent = RecentTokens(2, span, padding, torch.empty(0, 0, 3))
    # The first block of a scale k has position 0 alone, with k - 1 times padding before it.
    everything = torch.full((2, span - 1, 3), padding)
    for _ in range(20):
        length = everything.size(1) - span + 1
        new = torch.randn(2, rng.choice([1, 1, 2, 3, 17]) if length else 1, 3)
        recent.push(new, length)
        everything = torch.cat([everything, new], dim=1)
        last = everything.size(1) - span
        for factor in (factor for factor in (1, 2, 3, 4, 12) if span % factor == 0 and last % factor == 0):
            end = last + span
            assert torch.equal(recent.block(last, factor), everything[:, end - factor : end])
        order = torch.tensor([rng.randrange(2), rng.randrange(2)])
        recent.reorder(order)
        everything = everything[order]
