"""Flags that could change nothing, or break a rule, are refused where training begins; old checkpoints still load."""

from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils, tasks
from fairseq.models import MODEL_DATACLASS_REGISTRY

from fairseq_ms.errors import UsageError
from tests.helpers.operations import Operations
from tests.helpers.trained import TINY, random_lines, write_checkpoint, write_corpus
from tests.registry import ARCHITECTURES, build, dictionary

STREAMING = ["transformer_xl", "compressive_transformer", "transformer_ql"]
NARROW = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_attention_heads": 2, "tokens_per_sample": 8}
SHARE, POSITIVE, SPREAD = (1.0, "at least 0 and below 1"), (0, "at least 1"), (-0.5, "at least 0")
# A value that is refused in every model that has the flag, and the bounds that are named.
OUT_OF_BOUNDS: dict[str, tuple[float, str]] = {
    **dict.fromkeys(["dropout", "attention_dropout", "activation_dropout", "adaptive_softmax_dropout"], SHARE),
    **{"droppath": SHARE, "init_std": SPREAD, "embedding_init_std": SPREAD, "proj_init_std": SPREAD},
    **dict.fromkeys(["mem_len", "compressed_mem_len", "output_layers", "position_embed_dim"], (-1, "at least 0")),
    **dict.fromkeys(["decoder_layers", "decoder_attention_heads", "attention_head_dim", "max_segment_len"], POSITIVE),
    **dict.fromkeys(["token_embed_dim", "encoder_units", "decoder_units", "main_units", "local_layers"], POSITIVE),
    **dict.fromkeys(["local_attention_heads", "local_ffn_embed_dim"], POSITIVE),
    **{
        "compression_rate": (1, "at least 2"),
        "rotary_base": (0.5, "above 1"),
        "norm_eps": (0.0, "above 0"),
        "bag_of_words_weight": SPREAD,
    },
    "reconstruction_loss_weight": (0.0, "above 0"),
}
WITHOUT_MAIN, WITHOUT_LOCAL = "without --main transformer", "without --decoder transformer"
# A value that has no effect in any model that has the flag, and without what.
IDLE: dict[str, tuple[Any, str]] = {
    "adaptive_softmax_factor": (2.0, "without --adaptive-softmax-cutoff"),
    "adaptive_softmax_dropout": (0.2, "without --adaptive-softmax-cutoff"),
    "project_adaptive_head": (True, "without --adaptive-softmax-cutoff"),
    "adaptive_input_cutoff": ("4,7", "without --adaptive-input"),
    "adaptive_input_factor": (2.0, "without --adaptive-input"),
    "proj_init_std": (0.3, "without --adaptive-input or --adaptive-softmax-cutoff"),
    "rotary_base": (500.0, "without --positions rotary"),
    "query": ("linear", "without --criterion in_batch_sampled_softmax"),
    **dict.fromkeys(["local_layers", "local_attention_heads", "local_ffn_embed_dim"], (3, WITHOUT_LOCAL)),
}
OF_MAIN = dict.fromkeys(["decoder_layers", "decoder_ffn_embed_dim", "decoder_attention_heads"], (3, WITHOUT_MAIN))
HIERARCHICAL: list[tuple[dict[str, Any], dict[str, tuple[Any, str]]]] = [
    ({"main": "lstm"}, {**OF_MAIN, "attention_head_dim": (3, WITHOUT_MAIN)}),
    ({"main": "transformer"}, {"main_units": (9, "without --main lstm")}),
    ({"segmentation": "fixed"}, {"separators": ("word0", "without --segmentation words")}),
]


def narrow(arch: str, **flags: Any) -> dict[str, Any]:
    own = {"retina_lm": {"scale_windows": "1x=0:4,2x=4:8"}, "multiscale_bottomup": {"scale_layers": "4x=1,1x=1"}}
    sizes = {"tokens_per_sample": 8, "criterion": "cross_entropy"} if arch in ("haed", "hred") else NARROW
    return {**sizes, **own.get(arch, {}), **flags}


def assert_refused(arch: str, flags: dict[str, Any], name: str, value: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')} {sentence}: got {value}$"):
        build(arch, narrow(arch, **{**flags, name: value}), dictionary(9), positions=8)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_numbers_out_of_bounds_are_refused(arch: str) -> None:
    for name in OUT_OF_BOUNDS.keys() & MODEL_DATACLASS_REGISTRY[arch].__dataclass_fields__.keys():
        value, bounds = OUT_OF_BOUNDS[name]
        assert_refused(arch, {}, name, value, f"must be {bounds}")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_flag_without_what_it_is_about_is_refused_in_training_alone(arch: str) -> None:
    """A checkpoint may have been trained with it."""
    cases: list[tuple[dict, dict]] = [({}, IDLE), *(HIERARCHICAL if arch in ("haed", "hred") else [])]
    for flags, idle in cases:
        for name in idle.keys() & MODEL_DATACLASS_REGISTRY[arch].__dataclass_fields__.keys():
            value, without = idle[name]
            assert_refused(arch, flags, name, value, f"has no effect {without}")
            build(arch, narrow(arch, **{**flags, name: value}), dictionary(9), positions=8, from_checkpoint=True)


TWO_SCALES = {"scale_layers": "1x=2,2x=1"}
ADAPTED = {"adaptive_input": True, "adaptive_input_cutoff": "4,7", "adaptive_softmax_cutoff": "4,7"}
UNTIED = {**ADAPTED, "tie_adaptive_proj": True}
SINGLE = "has no effect with the single scale .*1x=2.*: got"
CLOSED = {"scale_layers": "4x=1,1x=1", "aggregation_gate": True, "init_residual": "zero"}


@pytest.mark.parametrize(
    ("arch", "flags", "helps", "sentence"),
    [
        ("vanilla_lm", UNTIED, {"tie_adaptive_weights": True}, "--tie-adaptive-proj .* --tie-adaptive-weights"),
        ("transformer_xl", {"proj_init_std": 0.3}, {"adaptive_softmax_cutoff": "4,7"}, "--proj-init-std has no effect"),
        ("transformer_ql", {"scale_layers": "1x=2", "droppath": 0.3}, TWO_SCALES, f"--droppath {SINGLE} 0.3"),
        ("transformer_ql", {"scale_layers": "1x=2", "compression": "avg"}, TWO_SCALES, f"--compression {SINGLE} avg"),
        ("multiscale_bottomup", CLOSED, {"init_residual": "scaled"}, "--init-residual must .* --aggregation-gate"),
    ],
)
def test_a_flag_is_refused_until_what_it_is_about_is_given(arch: str, flags: dict, helps: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        build(arch, {**NARROW, **flags}, dictionary(9), positions=8)
    build(arch, {**NARROW, **flags, **helps}, dictionary(9), positions=8)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_checkpoint_of_another_model_is_told_from_one_of_another_dictionary(arch: str) -> None:
    model = build(arch, narrow(arch), dictionary(9), positions=8)
    found = "sizes or dictionary differ"
    others = [(dictionary(7), 8, "its dictionary is 11 symbols large, and here it is 13"), (dictionary(9), 5, found)]
    for words, positions, sentence in others[: 1 if arch in (*STREAMING, "hred") else 2]:
        other = build(arch, narrow(arch, tokens_per_sample=positions), words, positions=positions)
        with pytest.raises(UsageError, match=sentence):
            model.load_state_dict(other.state_dict())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_flag_is_refused_at_its_default(arch: str) -> None:
    with torch.device("meta"):
        build(arch, {"tokens_per_sample": 16}, dictionary(9))


def test_a_checkpoint_with_a_flag_without_effect_is_still_evaluated(tmp_path, monkeypatch) -> None:
    data = write_corpus(tmp_path / "data", {split: random_lines(3, 20) for split in ("train", "test")})
    # As a release before the rule wrote it.
    written = pytest.MonkeyPatch()
    written.setattr("fairseq_ms.lm.base.BaseLanguageModel.refuse_idle", lambda cfg: None, raising=False)
    path = write_checkpoint(tmp_path / "old.pt", data, "vanilla_lm", *TINY, "--adaptive-softmax-factor", "2")
    written.undo()
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert models[0].decoder.adaptive_softmax is None
    _, cfg, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    with pytest.raises(ValueError, match=r"^--adaptive-softmax-factor has no effect"):
        tasks.setup_task(cfg.task).build_model(cfg.model)


COUNTED = {f"aten::{name}" for name in ("native_layer_norm", "rand", "bernoulli_", "native_dropout", "_softmax")}


@pytest.mark.parametrize("normalize_before", [True, False])
@pytest.mark.parametrize("arch", STREAMING)
def test_without_recomputation_backward_normalises_and_draws_nothing(arch: str, normalize_before: bool) -> None:
    found = {}
    for recompute in ("none", "pointwise"):
        dropouts = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1)
        flags = {**NARROW, **dropouts, "decoder_normalize_before": normalize_before, "recompute": recompute}
        model = build(arch, flags, dictionary(9)).train()
        loss = model(torch.randint(4, 13, (2, 20)))[0].sum()
        with Operations() as ran:
            loss.backward()
        found[recompute] = COUNTED & {*ran.names}
    assert found["none"] == set()
    assert {"aten::rand", "aten::native_layer_norm"} >= found["pointwise"] >= {"aten::rand"}
