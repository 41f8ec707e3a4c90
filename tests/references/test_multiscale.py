"""The multi-scale models agree with their references."""

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


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("arch", MODELS)
def test_logits_and_gradients_of_a_ragged_batch_are_those_of_the_paper(arch: str, seed: int) -> None:
    case = random_case(arch, seed)
    model = case.model.double()
    tokens_BT = torch.full((len(LENGTHS), max(LENGTHS)), case.dictionary.pad())
    rows = [case.tokens(1, length)[0] for length in LENGTHS]
    for row_T, row in zip(tokens_BT, rows):
        row_T[: len(row)] = row
    found = torch.cat([logits_TV[: len(row)] for logits_TV, row in zip(model(tokens_BT)[0], rows)])
    reference = getattr(multiscale, arch)
    expected = torch.cat([torch.stack(reference(weights_of(model), case.flags, row.tolist())) for row in rows])
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    names, parameters = zip(*model.named_parameters())
    direction = torch.randn_like(found)
    gradients, references = (
        torch.autograd.grad((logits * direction).sum(), parameters, materialize_grads=True)
        for logits in (found, expected)
    )
    for name, one, other in zip(names, gradients, references):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=TOLERANCE, msg=name)
