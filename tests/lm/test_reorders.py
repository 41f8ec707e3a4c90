"""What beam search's reorders cost."""

from typing import Any

import pytest
import torch

from tests.helpers.operations import Operations
from tests.registry import GENERATORS, random_case


@pytest.mark.parametrize("arch", GENERATORS)
def test_reordering_looks_at_the_order_once_and_copies_nothing_when_it_is_the_identity(arch: str) -> None:
    case = random_case(arch, 2)
    tokens = case.tokens(3, 5)
    state: dict[str, Any] = {}
    with torch.no_grad():
        case.model.decoder(tokens, incremental_state=state)
        for order, copies in (([0, 1, 2], False), ([2, 0, 0], True)):
            with Operations() as ran:
                case.model.decoder.reorder_incremental_state_scripting(state, torch.tensor(order))
            # Every look at the numbers of a tensor makes a GPU's caller wait.
            assert sum(name in ("aten::equal", "aten::_local_scalar_dense") for name in ran.names) == 1
            assert ("aten::index_select" in ran.names) is copies
