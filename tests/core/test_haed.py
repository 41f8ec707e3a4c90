"""HAED without fairseq: texts read at once, in parts, and token by token."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_ms.core import HAED, HRED, HAEDConfig, HREDConfig

SMALL: dict[str, Any] = {
    "vocab_size": 9,
    "max_segment_len": 4,
    "layers": 2,
    "dim": 16,
    "ffn_dim": 20,
    "heads": 2,
    "head_dim": 4,
}
SMALL |= {"main_units": 13, "decoder_units": 8, "local_heads": 2, "encoder_units": 7, "token_dim": 3, "position_dim": 4}
PARTS = [*itertools.product(("mlp", "lstm"), ("transformer", "lstm"), ("lstm", "transformer"), ("words", "fixed"))]


def small(**wanted: Any) -> HAED:
    """A random model in float64."""
    torch.manual_seed(1)
    separators = () if wanted.get("segmentation") == "fixed" else (3, 4)
    return HAED(HAEDConfig(**{**SMALL, "init_std": 0.4, "separators": separators, **wanted})).double().eval()


@pytest.mark.parametrize("parts", PARTS, ids="-".join)
def test_a_text_in_parts_is_the_text_at_once_under_reorders(parts: tuple[str, ...]) -> None:
    model = small(**dict(zip(("encoder", "main", "decoder", "segmentation"), parts)))
    tokens = torch.randint(0, 9, (3, 30))
    with torch.no_grad():
        whole = model.features(tokens)
        # Too little room, so that caches grow.
        state = model.new_state(3, 1)
        found: list[Tensor] = [model.features(part, state) for part in tokens.split([11, 1, 1, 1, 1, 6, 9], dim=1)[:6]]
        torch.testing.assert_close(torch.cat(found, dim=1), whole[:, :21], rtol=0.0, atol=1e-11)
        order = torch.tensor([2, 0, 1, 1])
        state.reorder(order)
        rest = model.features(tokens[order, 21:], state)
    torch.testing.assert_close(rest, whole[order, 21:], rtol=0.0, atol=1e-11)
    assert state.length == 30


@pytest.mark.parametrize("parts", PARTS, ids="-".join)
def test_padding_is_a_symbol_wherever_it_is(parts: tuple[str, ...]) -> None:
    """To whole texts and to states, as in every other model."""
    model = small(**dict(zip(("encoder", "main", "decoder", "segmentation"), parts)), padding_idx=1)
    tokens = torch.randint(2, 9, (3, 17))
    tokens[0, :3], tokens[1, 5:12], tokens[1, 14:], tokens[2, -1] = 1, 1, 1, 1
    state = model.new_state(3, 17)
    with torch.no_grad():
        found = [model.features(part, state) for part in tokens.split([2, 1, 6, 8], dim=1)]
        torch.testing.assert_close(torch.cat(found, dim=1), model.features(tokens), rtol=0.0, atol=1e-11)


def test_without_a_padding_symbol_every_symbol_is_a_token() -> None:
    model = small()
    assert (model.encoder.embed.num_embeddings, model.encoder.pad, model.project.out_features) == (10, 9, 9)
    assert HAEDConfig.from_dict(model.config.to_dict()) == model.config


def test_hred_has_lstms_for_encoder_and_main() -> None:
    model = HRED(HREDConfig(**{**SMALL, "separators": (3,)}))
    assert "encoder.lstm.cell.weight_hh_l0" in model.state_dict()
    assert "main.lstm.cell.weight_hh_l0" in model.state_dict()
