"""HAED without fairseq: texts read at once, in parts, and token by token."""

import itertools
import re
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


def test_without_a_padding_symbol_every_symbol_is_a_token() -> None:
    model = small()
    assert (model.encoder.embed.num_embeddings, model.encoder.pad, model.project.out_features) == (10, 9, 9)
    assert HAEDConfig.from_dict(model.config.to_dict()) == model.config


def test_hred_has_lstms_for_encoder_and_main() -> None:
    model = HRED(HREDConfig(**{**SMALL, "separators": (3,)}))
    assert "encoder.lstm.cell.weight_hh_l0" in model.state_dict()
    assert "main.lstm.cell.weight_hh_l0" in model.state_dict()


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"main": "mlp"}, "main must be lstm or transformer: got 'mlp'"),
        ({"dim": 4}, "dim must exceed position_dim 4: got 4"),
        ({"decoder": "transformer", "decoder_units": 7}, "local_heads must divide decoder_units 7: got 2"),
        ({"separators": ()}, "separators must name the symbols that end a word: got none"),
        ({"segmentation": "fixed", "separators": (3,)}, "separators have no meaning with fixed segmentation: got (3,)"),
        ({"separators": (3, 10)}, "separators must be symbols from 0 to 9, none of them padding: got (3, 10)"),
        ({"segmentation": "chars"}, "segmentation must be words or fixed: got 'chars'"),
        ({"max_segment_len": 0}, "max_segment_len must be at least 1: got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_sentence(wanted: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        small(**wanted)
