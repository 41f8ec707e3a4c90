"""Which parameters are matrices of layers, and which are not."""

from typing import Any

import pytest

from fairseq_ms import core
from fairseq_ms.core.groups import rows_of_projections
from fairseq_ms.core.iem import ImplicitEmbedding
from tests.core.test_model import ADAPTIVE, NAMES, build

# No width of these models.
SYMBOLS = 37
UNTIED = {"tie_embeddings": False}
CASES = [
    *((name, {}) for name in NAMES),
    *((name, UNTIED) for name in ("Vanilla", "Retina", "TransformerXL")),
    *(("Vanilla", {**ADAPTIVE, "tie_adaptive_weights": tied}) for tied in (False, True)),
    ("HAED", {"decoder": "transformer"}),
    ("TopDown", {"downsampler": "conv"}),
]
NO_MATRIX = ("embed", "places", "positions", "project.", "adaptive_softmax", "lstm.cell", "norm", "bias")

# Queries, keys and values share their weight; so do a coarse scale's keys and values.
SEVERAL = ("qkv", "attention.fine", "attention.coarse", "aggregate.coarse", "aggregate.attention.coarse")


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_every_parameter_is_in_one_group_and_projections_within_the_model_are_matrices(
    name: str, changes: dict[str, Any]
) -> None:
    model = build(name, vocab_size=SYMBOLS, **changes)
    matrices, others = core.matrices_and_others(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert len(names) == len(matrices) + len(others)
    assert set(names) == {*matrices, *others}
    for parameter in matrices:
        assert parameter.dim() == 2
        assert SYMBOLS not in parameter.shape
        assert not any(part in names[parameter] for part in NO_MATRIX), names[parameter]
    rows = rows_of_projections(model)
    assert list(rows) == matrices
    for parameter, sizes in rows.items():
        assert sum(sizes) == parameter.size(0)
        assert (len(sizes) > 1) == any(part in names[parameter] for part in SEVERAL), names[parameter]
    for parameter in others:
        named = names[parameter] in ("u", "v") or any(part in names[parameter] for part in NO_MATRIX)
        assert named, names[parameter]


def test_the_first_phase_of_haed_has_its_encoder_and_main_model() -> None:
    model = ImplicitEmbedding(core.HAEDConfig(vocab_size=SYMBOLS, separators=(3,), layers=1), projected=True)
    matrices, others = core.matrices_and_others(model)
    # Two of the encoder, four of the layer, and the projection that is compared with encodings.
    assert len(matrices) == 7
    assert len(others) == len(list(model.parameters())) - 7
