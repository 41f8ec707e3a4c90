"""The memory command: what a step keeps by part, and what fits into a budget."""

import copy
import functools
import itertools
import json
from typing import Any

import pytest
from omegaconf import OmegaConf

from fairseq_ms.cli import main
from fairseq_ms.commands import memory
from fairseq_ms.tools import training_step, untrained
from fairseq_ms.tools.saved_bytes import saved_bytes

SIZES = ["--decoder-embed-dim", "48", "--decoder-ffn-embed-dim", "192", "--decoder-attention-heads", "6"]


PLAIN: dict[str, Any] = {}
KEEPING_ALL = {"recompute": "none", "activation_dropout": 0.1}
STEPS = [
    (["vanilla_lm", "--decoder-layers", "2", "--scale-windows", "1x=0:64"], KEEPING_ALL),
    (["retina_lm", "--decoder-layers", "2", "--downsampler", "max"], PLAIN),
    (["retina_lm", "--decoder-layers", "2", "--kv-heads", "3", "--scale-windows", "1x=0:8,4x=8:64,16x=64:"], PLAIN),
    (["multiscale_topdown", "--scale-layers", "16x=1,4x=1,1x=1", "--downsampler", "conv"], PLAIN),
    (["multiscale_bottomup", "--scale-layers", "16x=1,4x=1,1x=1"], KEEPING_ALL),
    (["coarse_lm", "--scale-layers", "4x=2"], {"checkpoint_activations": True}),
    (["compressive_transformer", "--decoder-layers", "2", "--mem-len", "9"], PLAIN),
    (["transformer_ql", "--scale-layers", "1x=1,2x=1", "--decoder-normalize-before"], {"attention_dropout": 0.0}),
]


@functools.cache
def configuration(*flags: str) -> Any:
    """Parsing fairseq's flags takes most of the time of a test."""
    return untrained.parse(["--arch", *flags, *SIZES, "--tokens-per-sample", "70"])


@pytest.mark.parametrize(("flags", "setting"), STEPS)
def test_shapes_alone_tell_byte_for_byte_what_a_step_keeps_of_every_part(flags: list[str], setting: dict[str, Any]):
    cfg = copy.deepcopy(configuration(*flags))
    for name, value in setting.items():
        setattr(cfg.model, name, value)
    model = untrained.build_model(cfg, 50)
    measured = training_step.step_parts(model, 3, 70)
    # What tells parts apart leaves the step as it is.
    loss = functools.partial(training_step.training_loss, model, training_step.training_sample(model, 2, 70))
    assert training_step.total(training_step.step_parts(model, 2, 70)) == saved_bytes(loss, model)
    with training_step.ShapesAlone():
        assert training_step.step_parts(untrained.build_model(cfg, 50), 3, 70) == measured


@pytest.mark.parametrize("key_heads", [6, 3, 1])
def test_a_layer_keeps_what_ops_readme_says_of_it(key_heads: int):
    # For every position: the layer's input, queries, keys and values, and what attention gives; the state after
    # attention and the input of GELU; two numbers of each norm.
    flags = "vanilla_lm", "--decoder-layers", "3", "--kv-heads", str(key_heads)
    model = untrained.build_model(configuration(*flags), 50)
    parts = training_step.step_parts(model, 2, 70)
    unit = 4 * 2 * 70
    assert parts["stack"]["attention"] == 3 * unit * (3 * 48 + 2 * 8 * key_heads + 2)
    assert training_step.weight_bytes(model.decoder.core.stack.layers[0].attention.qkv)["weights"] == 4 * (
        49 * (48 + 2 * 8 * key_heads)
    )
    assert parts["stack"]["feed-forward"] == 3 * unit * (48 + 192 + 2)
    assert parts["output, loss"]["rest"] == pytest.approx(unit * 50, rel=0.05)


def test_scales_are_parts_of_their_own_and_coarse_ones_keep_their_share():
    flags = "multiscale_topdown", "--scale-layers", "16x=1,4x=1,1x=1"
    parts = training_step.step_parts(untrained.build_model(configuration(*flags), 50), 1, 64)
    assert list(parts) == ["embed", "project", "scales 16x", "scales 4x", "scales 1x", "output, loss"]
    attention = {name: purposes["attention"] for name, purposes in parts.items() if name.startswith("scales")}
    assert attention["scales 1x"] == pytest.approx(4 * attention["scales 4x"], rel=0.1)


def test_two_samples_tell_what_five_keep():
    model = untrained.build_model(configuration("retina_lm", "--decoder-layers", "3"), 40).train()
    sample = training_step.training_sample(model, 5, 70)
    whole = saved_bytes(lambda: training_step.training_loss(model, sample), model)
    assert training_step.step_bytes(model, 5, 70) == whole


def test_a_loss_that_holds_no_logits_keeps_none_and_muon_has_one_moment_for_matrices(tmp_path, capsys):
    flags = ["retina_lm", "--decoder-layers", "2", "--no-bias", "--norm", "rms"]
    model = untrained.build_model(configuration(*flags), 5000).train()
    sample = training_step.training_sample(model, 2, 70)
    loss = functools.partial(training_step.training_loss, model, sample, True)
    assert training_step.step_bytes(model, 2, 70, linear=True) == saved_bytes(loss, model)
    assert training_step.step_bytes(model, 2, 70) > training_step.step_bytes(model, 2, 70, linear=True) + 4 * 140 * 5000
    command = ["memory", "--arch", *flags, *SIZES, "--tokens-per-sample", "70", "--vocabulary", "5000", "--cpu"]
    out = tmp_path / "memory.json"
    assert main([*command, "--criterion", "linear_cross_entropy", "--optimizer", "muon", "--json", str(out)]) == 0
    printed = json.loads(out.read_text())
    assert printed["gradient_of_logits"] == 0
    every = sum(parameter.numel() for parameter in model.parameters())
    matrices = 2 * (4 * 48 * 48 + 2 * 48 * 192)
    assert printed["weights"]["Muon and AdamW"] == 8 * every - 4 * matrices
    for wrong in (["--optimizer", "sgd"], ["--criterion", "label_smoothed_cross_entropy"]):
        assert main([*command, *wrong]) == 2
        assert f"{wrong[0]} must be one whose memory is known" in capsys.readouterr().err


def test_allocations_that_fit_are_those_of_trying_all_best_first():
    def footprint(layers):
        return 7 + 5 * layers[1] + 3 * layers[4] + layers[16]

    found = memory.fit(footprint, [16, 4, 1], 40, most=5, count=1000)
    every = [dict(zip((1, 4, 16), counts)) for counts in itertools.product(range(1, 6), repeat=3)]
    fitting = [layers for layers in every if footprint(layers) <= 40]
    assert sorted(map(str, fitting)) == sorted(str(layers) for layers, _ in found)
    assert all(size == footprint(layers) for layers, size in found)
    order = [(layers[1], layers[4], layers[16]) for layers, _ in found]
    assert order == sorted(order, reverse=True)


def test_fit_keeps_to_the_budget_with_weights_and_adam(tmp_path, capsys):
    flags = ["--arch", "multiscale_topdown", "--scale-layers", "4x=1,1x=1", *SIZES, "--tokens-per-sample", "64"]
    command = ["memory", *flags, "--vocabulary", "50", "--batch-size", "2", "--fit", "0.0042", "--json"]
    assert main([*command, str(tmp_path / "fit.json")]) == 0
    (best, *_) = json.loads((tmp_path / "fit.json").read_text())["allocations"]
    assert min(best["layers"].values()) > 1
    # The same model by itself: bytes kept, gradient of the logits, and 16 bytes a parameter.
    flags[3] = ",".join(f"{scale}x={count}" for scale, count in best["layers"].items())
    model, _ = untrained.build(flags, 50)
    beside = 4 * 2 * 64 * 50 + 16 * sum(parameter.numel() for parameter in model.parameters())
    assert best["bytes"] == pytest.approx(training_step.step_bytes(model, 2, 64) + beside)
    assert best["bytes"] <= 0.0042 * 2**30
    assert "best first" in capsys.readouterr().out


def test_footprint_is_measured_or_follows_shapes_and_is_drawn(tmp_path, capsys):
    flags = ["--arch", "multiscale_bottomup", "--scale-layers", "4x=1,1x=1", *SIZES, "--tokens-per-sample", "64"]
    found = []
    for more in (["--png", str(tmp_path / "out.png")], ["--no-measurement"]):
        command = ["memory", *flags, "--vocabulary", "50", "--batch-size", "3", "--json", str(tmp_path / "out.json")]
        assert main([*command, *more]) == 0
        found.append(json.loads((tmp_path / "out.json").read_text()))
    measured, followed = found
    assert (measured["kept"], measured["rows"]) == (followed["kept"], followed["rows"])
    assert measured["kept"] == sum(row["total"] for row in measured["rows"])
    assert measured["measured_per_target"] == measured["measured"] / (3 * 64)
    assert "measured" not in followed
    assert (tmp_path / "out.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    assert printed.count("kept for backward, measured") == 1


@pytest.mark.parametrize("half", ["--fp16", "--bf16"])
def test_half_precision_halves_what_layers_keep(half, tmp_path):
    rows = []
    flags = ["--arch", "vanilla_lm", "--decoder-layers", "1", *SIZES, "--tokens-per-sample", "64", "--vocabulary", "50"]
    for more in ([], [half], [half, "--no-measurement"]):
        assert main(["memory", *flags, *more, "--json", str(tmp_path / "out.json")]) == 0
        rows.append({row["part"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]})
    assert rows[1]["stack"]["attention"] == rows[0]["stack"]["attention"] / 2
    assert rows[2] == rows[1]


def test_shapes_that_depend_on_tokens_are_measured_and_not_followed(capsys):
    command = ["memory", "--arch", "haed", "--vocabulary", "30", "--tokens-per-sample", "40"]
    assert main(command) == 0
    assert "chunk_decoder" in capsys.readouterr().out
    assert main([*command, "--no-measurement"]) == 0
    assert "no breakdown: what it keeps depends on the tokens" in capsys.readouterr().out
    assert main([*command, "--no-measurement", "--png", "out.png"]) == 2
    command = ["memory", "--arch", "vanilla_lm", *SIZES, "--vocabulary", "60", "--adaptive-softmax-cutoff", "20"]
    assert main([*command, "--no-measurement", "--tokens-per-sample", "64"]) == 0
    assert "no breakdown: what it keeps depends on the tokens" in capsys.readouterr().out


def test_sweep_measures_a_layer_at_every_scale_and_draws(tmp_path, capsys):
    files = ["--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]
    flags = ["--arch", "vanilla_lm", "--decoder-embed-dim", "24", "--decoder-attention-heads", "2"]
    assert main(["memory", *flags, "--sweep", "64,128", "--cpu", *files]) == 0
    points = json.loads((tmp_path / "out.json").read_text())["sweep"]
    assert [(p["tokens"], p["scale"]) for p in points] == [*itertools.product((64, 128), (1, 4, 16, 64))]
    assert points[0]["measured"] == 4 * 64 * (6 * 24 + 3072 + 2 * 2)
    assert all(point["measured"] == points[0]["measured"] * point["tokens"] / 64 / point["scale"] for point in points)
    assert all(point["seconds"] > 0 for point in points)
    assert (tmp_path / "out.png").stat().st_size > 5000
    assert "forward (ms)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "symbols"),
    [
        ({"_name": "haed_wt103", "segmentation": "words"}, 260),
        ({"_name": "haed", "segmentation": "fixed"}, 260),
        ({"_name": "retina_lm_wt103_16"}, 33_346),
        ({"_name": "vanilla_lm"}, 31_300),
    ],
)
def test_a_preset_is_built_over_the_symbols_of_its_data_and_a_model_of_characters_over_bytes(
    flags: dict[str, str], symbols: int
) -> None:
    assert memory._symbols_of(OmegaConf.create(flags)) == symbols
