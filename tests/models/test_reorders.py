"""Caches stand any number of reorders between two steps."""

from __future__ import annotations

import pytest
import torch

from tests.registry import GENERATORS, random_case

REORDERS = 200
# In double precision: the two differ in the order of additions only.
TOLERANCE = 1e-9


@pytest.mark.parametrize("arch", GENERATORS)
def test_caches_equal_a_full_pass_under_200_reorders_a_step(arch: str) -> None:
    """Permutations mostly, so that rows stay different; now and then one takes another's place, or the batch grows."""
    case = random_case(arch, 0)
    length = 9
    tokens = case.tokens(5, length)
    state: dict = {}
    model = case.model.double()
    with torch.no_grad():
        for end in range(case.rng.randint(1, 4), length + 1):
            cached = model.decoder(tokens[:, :end], incremental_state=state)[0]
            full = model(tokens[:, :end])[0][:, -1:]
            torch.testing.assert_close(cached, full, rtol=0.0, atol=TOLERANCE)
            for _ in range(REORDERS):
                rows = tokens.size(0)
                order = torch.randperm(rows)
                if case.rng.random() < 0.02:
                    order = torch.randint(rows, (case.rng.randint(3, 7),))
                model.decoder.reorder_incremental_state_scripting(state, order)
                tokens = tokens[order]
            tokens = torch.cat([tokens[:, :end], case.tokens(tokens.size(0), length - end)], dim=1)
