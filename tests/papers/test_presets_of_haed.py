"""Every preset of the HAED paper, and its runs: that a file for hydra builds the model that the preset builds."""

import pytest

from fairseq_ms.commands.config import settings
from fairseq_ms.presets.registry import CONFIGS, PRESETS

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
