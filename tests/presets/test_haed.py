"""Every preset of the HAED paper, and its runs: that a file for hydra builds the model that the preset builds."""

import pytest

from fairseq_ms.commands.config import settings
from fairseq_ms.lm.registry import CONFIGS, PRESETS
from tests.helpers.hydra import OF_PAPERS

ARCHS = sorted(arch for arch in PRESETS.keys() & OF_PAPERS.keys() if PRESETS[arch].model in ("haed", "hred"))
RUNS = {
    f"{data}_{run}": f"{model}_{name}{rest}"
    for data, name in (("characters", "wt103"), ("pixels", "imagenet32"))
    for run, model, rest in (
        ("haed", "haed", ""),
        ("hred", "hred", ""),
        ("hred_transformer", "hred", "_transformer"),
        ("iem", "haed", "_iem"),
        ("finetune", "haed", "_iem"),
        ("end_to_end", "haed", "_iem"),
    )
}


def test_every_row_of_table_1_and_figures_2_to_4_is_a_preset_for_both_data_sets() -> None:
    transformer: dict[str, object] = {"main": "transformer"}
    rows: dict[str, dict[str, object]] = {
        **{"hred_{}": {}, "hred_{}_transformer": transformer, "haed_{}": {}},
        **{f"hred_{{}}_transformer_encoder_{n}": {**transformer, "encoder_units": n} for n in (16, 64, 256, 1024)},
        **{f"haed_{{}}_decoder_{n}": {"decoder_units": n} for n in (128, 256, 512, 1024, 2048)},
        "haed_{}_iem": {"decoder_attention_heads": 12, "decoder_units": 2000},
        "haed_{}_megabyte": {"decoder": "transformer", "decoder_units": 512},
    }
    expected = {name.format("wt103"): values for name, values in rows.items()}
    expected |= {name.format("imagenet32"): {"segmentation": "fixed", **values} for name, values in rows.items()}
    assert {arch: PRESETS[arch].values for arch in ARCHS} == expected


def test_every_run_of_table_1_and_figure_4_has_a_name() -> None:
    assert CONFIGS.keys() - PRESETS.keys() == RUNS.keys()
    phases = {name: settings(CONFIGS[name])["criterion"]["_name"] for name in RUNS}
    assert {name for name, criterion in phases.items() if criterion != "cross_entropy"} == {
        "characters_iem",
        "pixels_iem",
    }


@pytest.mark.parametrize("data", ["characters", "pixels"])
def test_the_baseline_differs_from_the_second_phase_in_where_it_begins_alone(data: str) -> None:
    second, baseline = (settings(CONFIGS[f"{data}_{run}"]) for run in ("finetune", "end_to_end"))
    assert second["checkpoint"].pop("finetune_from_model") == "???"
    assert second["checkpoint"].pop("save_dir") != baseline["checkpoint"].pop("save_dir")
    assert second == baseline


def test_the_phases_see_different_halves_and_all_others_the_whole() -> None:
    halves = {name: CONFIGS[name].recipe.half for name in RUNS}
    assert {name: half for name, half in halves.items() if half} == {
        "characters_iem": "first",
        "pixels_iem": "first",
        "characters_finetune": "second",
        "pixels_finetune": "second",
    }
