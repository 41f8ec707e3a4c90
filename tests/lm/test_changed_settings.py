"""What a run may change when it goes on: what leaves the trained weights the model that they are of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY

from fairseq_ms.host.rules import is_ours

ARCHITECTURES = [arch for arch, model in MODEL_REGISTRY.items() if model.__module__.startswith("fairseq_ms.")]
# Computing, regularising, losses, the start of weights, and how long texts may be.
FREE = {
    *("dropout", "attention_dropout", "activation_dropout", "adaptive_softmax_dropout", "droppath"),
    *("checkpoint_activations", "compile", "recompute", "init_residual", "init_std", "embedding_init_std"),
    *("proj_init_std", "max_target_positions", "criterion", "query", "_name"),
    *("reconstruction_loss_weight", "bag_of_words_weight"),
}
OF_STREAMS = {"tokens_per_sample", "mem_len", "compressed_mem_len"}


def defaults(arch: str) -> dict[str, Any]:
    fields = MODEL_DATACLASS_REGISTRY[arch].__dataclass_fields__
    return {name: known.default for name, known in fields.items()} | {"_name": arch}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_setting_is_compared_but_those_that_leave_the_model_as_it_is(arch: str) -> None:
    model, then = MODEL_REGISTRY[arch], defaults(arch)
    assert model.changed(then, SimpleNamespace(**then), True) is None
    assert model.changed({"_name": arch}, SimpleNamespace(**then), True) is None, "written before there were flags"
    streams = "mem_len" in then
    for name in then:
        now, spelled = SimpleNamespace(**{**then, name: "another"}), name.replace("_", "-")
        before = {**then, name: 3}
        wrong = None if name in FREE or (name in OF_STREAMS and not streams) else f"--{spelled} was 3 and is another"
        assert model.changed(before, now, True) == wrong, name
        assert model.changed(before, now, False) == (None if name in OF_STREAMS else wrong), name


def test_numbers_and_words_are_the_same_however_they_are_written() -> None:
    then = {**defaults("retina_lm"), "qk_norm": "True", "rotary_base": 100.0, "positions": "rotary"}
    now = SimpleNamespace(**{**then, "qk_norm": True, "rotary_base": 100, "tokens_per_sample": 3})
    assert MODEL_REGISTRY["retina_lm"].changed(then, now, True) is None


def test_another_architecture_is_another_model_whatever_its_weights_are_called() -> None:
    then = defaults("vanilla_lm")
    model = MODEL_REGISTRY["retina_lm"]
    assert model.changed(then, SimpleNamespace(**defaults("retina_lm")), True) == "--arch was vanilla_lm"
    preset = {**defaults("retina_lm"), "_name": "retina_lm_wt103_16"}
    assert model.changed(preset, SimpleNamespace(**defaults("retina_lm")), True) is None
    assert is_ours(model.__new__(model))
