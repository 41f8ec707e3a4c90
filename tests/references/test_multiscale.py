"""The multi-scale models agree with their second references."""

from __future__ import annotations

import pytest
import torch

from tests.references import multiscale
from tests.references.parts import weights_of
from tests.registry import random_case

# Both sides compute in double precision and differ in the order of additions only.
TOLERANCE = 1e-9

# Shorter than every window and block, a few blocks, and lengths that divide no scale; padded to one batch.
LENGTHS = [1, 2, 5, 23]

MODELS = ["vanilla_lm", "retina_lm", "multiscale_topdown", "multiscale_bottomup", "coarse_lm"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("arch", MODELS)
def test_logits_of_a_ragged_batch_are_those_of_the_paper(arch: str, seed: int) -> None:
    case = random_case(arch, seed)
    model = case.model.double()
    tokens_BT = torch.full((len(LENGTHS), max(LENGTHS)), case.dictionary.pad())
    rows = [case.tokens(1, length)[0] for length in LENGTHS]
    for row_T, row in zip(tokens_BT, rows):
        row_T[: len(row)] = row
    with torch.no_grad():
        logits_BTV = model(tokens_BT)[0]
    reference = getattr(multiscale, arch)
    for logits_TV, row in zip(logits_BTV, rows):
        expected_TV = reference(weights_of(model), case.flags, row.tolist())
        assert len(expected_TV) == len(row)
        for logits_V, expected_V in zip(logits_TV, expected_TV):
            torch.testing.assert_close(logits_V, torch.from_numpy(expected_V), rtol=0, atol=TOLERANCE)
