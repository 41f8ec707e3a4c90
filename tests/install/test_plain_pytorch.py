"""The example's plain PyTorch loop: processes, checkpoints, and what it refuses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import ROOT, environment
from tests.helpers.trained import random_lines, write_corpus

SCRIPT = ROOT / "user_dir_examples" / "plain_pytorch" / "train.py"
SMALL = ["--set", "dim=24", "ffn_dim=40", "heads=3", "layers=1", "dropout=0", "attention_dropout=0", "init_std=0.2"]
SMALL += ["--rows", "4", "--length", "40", "--save-every", "2", "--lr", "0.01"]


def run(*arguments: str, processes: int = 1) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), *arguments]
    env = environment({"OMP_NUM_THREADS": "1"})
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def losses(done: subprocess.CompletedProcess) -> dict[int, float]:
    """By update, those at checkpoints."""
    assert done.returncode == 0, done.stderr
    return {int(update): float(loss) for update, loss in re.findall(r"update (\d+): loss ([\d.]+)", done.stdout)}


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat, and nobody knew why she did. " * 40)
    return str(path)


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one_and_go_on_where_the_other_number_stopped(text: str, tmp_path: Path):
    out = [["--out", str(tmp_path / name)] for name in ("one", "two")]
    one = losses(run(text, *SMALL, *out[0], "--steps", "6"))
    assert list(one) == [2, 4, 6]
    two = losses(run(text, *SMALL, *out[1], "--steps", "6", processes=2))
    # Sums over four rows in two parts, float32.
    assert two == pytest.approx(one, abs=1e-6)
    assert two[6] < two[2] - 0.05
    more = losses(run(text, *SMALL, *out[0], "--steps", "8", processes=2))
    assert more == pytest.approx(losses(run(text, *SMALL, *out[1], "--steps", "8")), abs=1e-6)
    assert list(more) == [8]


@pytest.mark.slow
def test_with_muon_two_processes_have_the_losses_of_one_and_one_goes_on_where_they_stopped(text: str, tmp_path: Path):
    out, muon = [["--out", str(tmp_path / name)] for name in ("one", "two")], ["--muon-lr", "0.02"]
    one = losses(run(text, *SMALL, *muon, *out[0], "--steps", "4"))
    two = losses(run(text, *SMALL, *muon, *out[1], "--steps", "4", processes=2))
    # Muon rounds to eight bits, which another order of sums may tip.
    assert two == pytest.approx(one, abs=1e-3)
    assert losses(run(text, *SMALL, *out[0], "--steps", "4", "--out", str(tmp_path / "adamw"))) != one
    more = losses(run(text, *SMALL, *muon, *out[1], "--steps", "6"))
    assert more == pytest.approx(losses(run(text, *SMALL, *muon, *out[0], "--steps", "6")), abs=2e-3)


@pytest.mark.slow
def test_binarised_data_are_read_and_bad_data_are_one_sentence(tmp_path: Path):
    data = write_corpus(tmp_path / "data", {"train": random_lines(1, 60)})
    assert losses(run(str(data / "train"), *SMALL, "--out", str(tmp_path / "out"), "--steps", "2"))
    refused = run(str(tmp_path / "none"), *SMALL)
    assert refused.returncode == 1
    assert refused.stderr.strip().splitlines() == [
        f"DATA must be a text file or the prefix of a .bin and an .idx file: got {tmp_path / 'none'}"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "dim=wide"], "--set must be FIELD=JSON of a VanillaConfig: Expecting value"),
        (
            ["--set", "width=8"],
            "--set must be FIELD=JSON of a VanillaConfig: VanillaConfig.__init__() got an unexpected",
        ),
        (["--set", "dim=50"], "--set must be FIELD=JSON of a VanillaConfig: heads must divide dim 50: got 12"),
        (["--rows", "0"], "--length must be 1 to "),
        (["--model", "Model"], "train.py: error: argument --model: invalid choice: 'Model'"),
    ],
)
def test_wrong_settings_are_one_sentence(text: str, tmp_path: Path, arguments: list[str], sentence: str):
    refused = run(text, *arguments, "--out", str(tmp_path / "out"))
    assert refused.returncode != 0
    assert refused.stderr.strip().splitlines()[-1].startswith(sentence)
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_short_texts_are_trained_on_and_a_checkpoint_of_other_sizes_is_refused(text: str, tmp_path: Path):
    arguments = [text, *SMALL, "--length", "5", "--out", str(tmp_path / "out")]
    assert list(losses(run(*arguments, "--steps", "2"))) == [2]
    sizes = ["--set", "dim=36", "heads=3", "ffn_dim=40", "layers=1"]
    refused = run(*arguments, *sizes, "--steps", "4")
    assert refused.returncode == 1
    last = refused.stderr.strip().splitlines()[-1]
    assert last == f"--out must be a new folder: {tmp_path / 'out' / 'checkpoint'} is of another model or other sizes"
