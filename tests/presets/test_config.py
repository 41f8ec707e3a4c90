"""``fairseq-ms config``: what it writes for every preset of every paper, and the ready file of each."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fairseq_ms import cli
from fairseq_ms.analysis.config import config_text
from fairseq_ms.lm.registry import CONFIGS, PRESETS
from tests.helpers.cli import ROOT
from tests.helpers.hydra import assert_the_file_carries_the_values_of, build_everything, composed

READY = sorted((ROOT / "user_dir_examples").glob("*/config/*.yaml"))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_configuration_builds_its_model_criterion_optimizer_and_schedule(name: str) -> None:
    written = OmegaConf.create(config_text(CONFIGS[name]))
    # What the file leaves to the caller, and nothing else.
    left = {"task.data", "checkpoint.finetune_from_model"} if name.endswith("_finetune") else {"task.data"}
    assert OmegaConf.missing_keys(written) == left
    cfg = composed(written)
    assert cfg.checkpoint.save_dir == f"checkpoints/{name}"
    cutoffs = written.model.get("adaptive_softmax_cutoff", "300")
    build_everything(cfg, int(cutoffs.split(",")[-1]) + 1000)


@pytest.mark.parametrize("arch", sorted(PRESETS))
def test_the_file_of_a_preset_says_what_its_arch_says(arch: str) -> None:
    assert_the_file_carries_the_values_of(arch)


def test_every_preset_has_a_configuration() -> None:
    assert PRESETS.keys() <= CONFIGS.keys()
    assert all(PRESETS[name] is CONFIGS[name] for name in PRESETS)


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_the_ready_file_of_a_paper_is_what_the_command_prints(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", path.stem]) == 0
    assert capsys.readouterr().out == path.read_text(encoding="utf-8")


def test_every_paper_has_one_ready_file() -> None:
    assert len(READY) == 3
    assert {CONFIGS[path.stem].recipe.source.split(" of ")[1] for path in READY} == {
        preset.recipe.source.split(" of ")[1] for preset in CONFIGS.values()
    }


def test_out_writes_what_is_printed_into_a_folder_that_need_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "haed_wt103"]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["config", "haed_wt103", "--out", str(tmp_path / "configs" / "mine.yaml")]) == 0
    assert (tmp_path / "configs" / "mine.yaml").read_text(encoding="utf-8") == printed
    assert [path.name for path in (tmp_path / "configs").iterdir()] == ["mine.yaml"]
    assert capsys.readouterr().out == ""


def test_an_unknown_preset_gets_one_sentence_with_names_like_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "retina_lm_wt103"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fairseq-ms: PRESET must be one such as retina_lm_wt103_16 or ")
    assert said.endswith("got 'retina_lm_wt103'\n")
