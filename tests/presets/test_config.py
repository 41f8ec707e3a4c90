"""``fairseq-ms config``: what it writes for every preset of every paper, and the ready file of each."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fairseq_ms import cli
from fairseq_ms.commands.config import SIZES, config_text, half_of
from fairseq_ms.errors import UsageError
from fairseq_ms.presets.registry import CONFIGS, PRESETS, Preset
from tests.helpers.cli import ROOT, USER_DIR, run_cli
from tests.helpers.corpus import large_data
from tests.helpers.hydra import OF_PAPERS, assert_the_file_carries_the_values_of, build_everything, composed
from tests.presets import record

READY = sorted((ROOT / "user_dir_examples").glob("*/config/*.yaml"))


def one_of_each_model(presets: Mapping[str, Preset]) -> list[Any]:
    """All names for ``parametrize``; `make test` takes the last of each model."""
    last = {preset.model: name for name, preset in sorted(presets.items())}.values()
    return [name if name in last else pytest.param(name, marks=pytest.mark.slow) for name in sorted(presets)]


@pytest.mark.parametrize("name", one_of_each_model(CONFIGS))
def test_a_configuration_builds_its_model_criterion_optimizer_and_schedule(name: str) -> None:
    written = OmegaConf.create(config_text(CONFIGS[name]))
    # What the file leaves to the caller, and nothing else.
    left = {"task.data", "checkpoint.finetune_from_model"} if name.endswith("_finetune") else {"task.data"}
    if CONFIGS[name].model in ("haed", "hred") or (name not in OF_PAPERS and name[:14] != "transformer_ql"):
        left.add("optimization.max_update")  # an epoch's, which depends on the data
    assert OmegaConf.missing_keys(written) == left
    cfg = composed(written)
    assert cfg.checkpoint.save_dir == f"checkpoints/{name}"
    assert cfg.dataset.required_batch_size_multiple == 1, "fairseq's 8 leaves out the last rows"
    cutoffs = written.model.get("adaptive_softmax_cutoff", "300")
    build_everything(cfg, int(cutoffs.split(",")[-1]) + 1000)


@pytest.mark.parametrize("arch", one_of_each_model(PRESETS))
def test_the_file_of_a_preset_says_what_its_arch_says(arch: str) -> None:
    assert_the_file_carries_the_values_of(arch)


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_the_ready_file_of_a_paper_is_what_the_command_prints(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", path.stem]) == 0
    assert capsys.readouterr().out == path.read_text(encoding="utf-8")


def test_out_writes_what_is_printed_into_a_folder_that_need_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "haed_wt103"]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["config", "haed_wt103", "--out", str(tmp_path / "configs" / "mine.yaml")]) == 0
    # A second file of a preset is of another run.
    assert (tmp_path / "configs" / "mine.yaml").read_text(encoding="utf-8") == re.sub(
        "(checkpoints/|configs/|--config-name )haed_wt103", r"\1mine", printed
    )
    assert [path.name for path in (tmp_path / "configs").iterdir()] == ["mine.yaml"]
    assert str(tmp_path / "configs" / "mine.yaml") in capsys.readouterr().out


def test_the_flags_of_an_architecture_are_those_of_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for arch in ("retina_lm", "vanilla_lm_tiny"):
        assert cli.main(["config", "--flags", arch]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) < 140
        found.append({re.split(r" {2,}", line)[0] for line in lines[2:]})
    assert {"--scale-heads", "--downsampler"} <= found[0] - found[1]
    assert {"--short-conv", "--scale-windows", "--activation-fn"} <= found[0] & found[1]


def test_our_own_presets_are_listed_without_the_papers_(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--list"]) == 0
    own = capsys.readouterr().out
    assert "retina_lm_tiny" in own
    assert "haed_wt103" not in own
    assert (
        re.findall(r"^(\S+_(?:long|window)_\d+) ", own, re.MULTILINE)
        == re.findall(r"^(\S+_\S+) ", own, re.MULTILINE)[:6]
    )


def test_a_file_has_other_windows_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windows = "1x=0:8*2,1x=0:*6|1x=0:32"
    for name in ("retina_lm_small", "vanilla_lm_small"):
        assert cli.main(["config", name, "--scale-windows", windows]) == 0
        cfg = composed(OmegaConf.create(capsys.readouterr().out))
        assert cfg.model.scale_windows == windows
        build_everything(cfg, 100)


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> tuple[list[list[str]], dict[str, str]]:
    """The rows of ``--list``, and its papers by number."""
    assert cli.main(["config", "--list", "--papers"]) == 0
    table, notes = capsys.readouterr().out.split("\n\n")
    rows = [re.split(r" {2,}", line) for line in table.splitlines()[2:]]
    return rows, dict(re.findall(r"^(\[\d\]) (.*)$", notes, re.MULTILINE))


def test_list_prints_every_preset_with_its_sizes_and_its_table(listed: Any) -> None:
    rows, papers = listed
    of = {preset.name: preset.recipe.source.partition(" of ")[2] or preset.recipe.source for preset in CONFIGS.values()}
    sizes = json.loads(SIZES.read_text())
    for name, symbols, parameters, kept, where in rows:
        number, table = where.split(" ", 1)
        assert (table, papers[number]) == (CONFIGS[name].table, of[name])
        assert int(symbols) == sizes[name][0]
        assert float(parameters) == round(sizes[name][1] / 1e6, 1)
        assert sizes[name][2] is None if kept == "-" else float(kept) == round(sizes[name][2] / 1e3, 1)
    assert sorted(row[0] for row in rows) == sorted(CONFIGS)


def test_the_stored_sizes_are_those_of_all_presets() -> None:
    assert json.loads(SIZES.read_text()).keys() == CONFIGS.keys(), "run make sizes"


@pytest.mark.parametrize(
    "name", ["multiscale_topdown_books_2_4_8_12", "transformer_ql_simplebooks2", "haed_wt103_iem", "coarse_lm_wt103_4x"]
)
def test_the_stored_sizes_are_those_of_the_models(name: str) -> None:
    assert json.loads(SIZES.read_text())[name] == list(record.sizes(name)), "run make sizes"


def test_list_and_files_need_neither_torch_nor_fairseq() -> None:
    program = (
        "import sys; sys.argv = ['fairseq-ms']\n"
        "from fairseq_ms.cli import main\n"
        "assert main(['config', '--list']) == main(['config', 'haed_wt103']) == 0\n"
        "print(sorted({'torch', 'fairseq', 'numpy'} & set(sys.modules)))"
    )
    assert run_cli("python", "-c", program).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("name", "folder", "updates"),
    [
        # About half of WikiText-103 in characters, and the 1,281,149 images less a validation split.
        ("characters_haed", "bin", -(-268_800_000 // 1344 // 32)),
        ("characters_iem", "halves/first", 268_800_000 // 2 // 1344 // 32),
        ("characters_finetune", "halves/second", 268_800_000 // 2 // 1344 // 32),
        ("pixels_iem", "halves/first", -(-70_000 // 32)),
    ],
)
def test_with_data_a_run_takes_one_epoch_of_its_share(name: str, folder: str, updates: int, tmp_path: Path) -> None:
    data = large_data(tmp_path, 268_800_000, 140_000)
    assert cli.main(["config", name, "--data", str(data), "--out", str(tmp_path / "c.yaml")]) == 0
    written = OmegaConf.load(tmp_path / "c.yaml")
    assert written.task.data == str(tmp_path / folder)
    paths = (written.common.user_dir, written.checkpoint.save_dir)
    assert paths == (str(USER_DIR), str(Path("checkpoints", "c").absolute()))
    assert written.optimization.max_update == updates
    assert "task.data" not in OmegaConf.missing_keys(written)


def test_the_papers_own_number_of_updates_is_not_the_datas(tmp_path: Path) -> None:
    data = large_data(tmp_path, 1000, 10)
    for name, more, updates in (
        ("transformer_ql_wt103", (), 350_000),
        ("transformer_ql_wt103", ("--max-update", "7"), 7),
        ("characters_haed", ("--max-update", "60"), 60),
    ):
        assert cli.main(["config", name, "--data", str(data), *more, "--out", str(tmp_path / "c.yaml")]) == 0
        written = OmegaConf.load(tmp_path / "c.yaml")
        assert (written.task.data, written.optimization.max_update) == (str(data), updates)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ("characters_haed --data nowhere", "--data"),
        ("characters_iem --data alone/bin", "--data"),
        ("characters_haed --data bin", "--data"),
        ("characters_haed --data bin --max-update 0", "--max-update"),
        ("", "PRESET or --list"),
        ("haed_wt103 --list", "PRESET or --list"),
        ("haed_wt103 --papers", "--papers"),
        ("--flags transformer_lm", "--flags"),
        ("haed_small --scale-windows 1x=0:8", "--scale-windows"),
        ("retina_lm_tiny --scale-windows 1x=8", "--scale-windows"),
        ("retina_lm_tiny --scale-windows 1x=0:8*3", "--scale-heads"),
        ("vanilla_lm_tiny --scale-windows 1x=0:16,16x=16:", "--scale-windows"),
        ("retina_lm_wt103", "PRESET"),
        ("retina_lm", "PRESET"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(
    given: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    large_data(tmp_path, 1000, 10)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", *given.split()]) == 2
    printed = capsys.readouterr()
    assert re.match(f"fairseq-ms: {flag}( of \\S+)? must ", printed.err)
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    # An architecture is told which presets it has.
    assert given != "retina_lm" or {"retina_lm_tiny", "retina_lm_wt103_16"} <= set(re.findall(r"\w+", printed.err))


def test_the_folder_above_the_data_is_told_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("train.idx", "dict.txt"):
        (tmp_path / "bin" / name).touch()
    with pytest.raises(UsageError, match=r"did you mean .*/bin"):
        half_of(tmp_path, "")
    assert half_of(tmp_path / "bin", "") == tmp_path / "bin"


def test_a_half_that_is_named_itself_is_taken(tmp_path: Path) -> None:
    (half := tmp_path / "halves" / "second").mkdir(parents=True)
    (half / "train.idx").touch()
    assert {half_of(tmp_path / "bin", "second"), half_of(half, "second"), half_of(half, "")} == {half}
