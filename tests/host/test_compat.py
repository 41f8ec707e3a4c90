"""NumPy's removed names, wrong or missing packages, and messages of other libraries."""

import contextlib
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_ms.errors import INSTALL_FAIRSEQ
from fairseq_ms.host import compat
from tests.helpers.cli import ROOT, USER_DIR, run_cli
from tests.helpers.corpus import SPLITS, train_command, write_corpus

OLDEST = "1.26" if sys.version_info < (3, 13) else "2.1"
BUNDLED_NUMPY = Path(sys.prefix) / "numpy-oldest"


@pytest.fixture(scope="session")
def oldest_numpy(tmp_path_factory) -> Path:
    """A folder holding the oldest NumPy that is supported on this Python, to be put in front of the installed one."""
    if BUNDLED_NUMPY.is_dir():
        return BUNDLED_NUMPY
    folder = tmp_path_factory.mktemp("numpy-oldest")
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, "-r", str(ROOT / "requirements" / "numpy-oldest.txt")], check=True)
    return folder


def write_package(folder: Path, name: str, files: dict[str, str]) -> None:
    """A package with the given sources, __init__.py among them if it is to have one."""
    for path, source in files.items():
        target = folder / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source, encoding="utf-8")


def test_numpy_without_compat_gets_it_and_numpy_with_it_keeps_its_own(monkeypatch):
    monkeypatch.delattr(np, "compat")
    compat.restore_numpy_names()
    restored = vars(np)["compat"]
    assert restored.long is int
    compat.restore_numpy_names()
    assert vars(np)["compat"] is restored


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """As fairseq's own command binarises it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    prefixes = [part for split in SPLITS for part in (f"--{split}pref", folder / f"{split}.txt")]
    run_cli("fairseq-preprocess", "--only-source", *prefixes, "--destdir", folder / "fairseqs")
    return folder / "fairseqs"


@pytest.mark.parametrize("version", ["2", OLDEST])
def test_training_evaluation_and_sampling_work_without_a_warning_on_the_screen(version, data, tmp_path, request):
    env = {} if version == "2" else {"PYTHONPATH": str(request.getfixturevalue("oldest_numpy"))}
    used = run_cli("python", "-c", "import numpy; print(numpy.__version__)", env=env).stdout
    assert used.startswith(f"{version}.")
    checkpoint = tmp_path / "checkpoint_last.pt"
    load = ["--user-dir", USER_DIR, "--path", checkpoint, "--cpu"]
    screens = [
        run_cli(*train_command("retina_lm", data, tmp_path), env=env),
        run_cli("fairseq-eval-lm", data, *load, "--tokens-per-sample", "24", "--context-window", "9", env=env),
        run_cli(
            *("fairseq-interactive", data, *load, "--task", "language_modeling", "--tokens-per-sample", "24"),
            *("--sampling", "--beam", "1", "--max-len-b", "9"),
            input="word1 word2\n",
            env=env,
        ),
    ]
    perplexity = re.search(r"Perplexity: ([0-9.]+)", screens[1].stdout + screens[1].stderr)
    assert perplexity is not None
    assert 1 < float(perplexity[1]) < 1000
    assert re.search(r"^H-0\t-?[0-9.]+\tword1 word2", screens[2].stdout, flags=re.MULTILINE)
    for done in screens:
        assert re.findall(r".*[Ww]arning.*", done.stdout + done.stderr) == []


IMPORTED, COMMAND = ["python", "-c", "import fairseq_ms.lm"], ["fairseq-ms", "perplexity", "checkpoint.pt"]


@pytest.mark.parametrize(
    ("command", "source", "reason"),
    [
        (IMPORTED, "raise ModuleNotFoundError(\"No module named 'fairseq'\", name='fairseq')", "which is missing"),
        (IMPORTED, "raise ValueError('mutable default <class x> for field y is not allowed')", "mutable default"),
        (IMPORTED, "import a_package_that_is_not_there", "a_package_that_is_not_there"),
        (COMMAND, "import a_package_that_is_not_there", "a_package_that_is_not_there"),
    ],
    ids=["missing", "not for this Python", "half installed", "command"],
)
def test_a_missing_or_broken_fairseq_gets_one_sentence_that_says_what_to_run(tmp_path, command, source, reason):
    write_package(tmp_path, "fairseq", {"__init__.py": source})
    # It is read first: one of a plain loop needs no fairseq.
    torch.save({"model": {}}, tmp_path / "checkpoint.pt")
    done = run_cli(*command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, check=False)
    tracebacks = done.stderr.count("Traceback")
    assert (done.returncode, tracebacks) == ((2, 0) if command[0] == "fairseq-ms" else (1, 1))
    sentence = done.stderr.splitlines()[-1]
    assert reason in sentence
    assert f"run: {'' if 'missing' in reason else 'pip uninstall fairseq && '}{INSTALL_FAIRSEQ}" in sentence


@pytest.mark.parametrize(
    ("version", "new_enough"), [("2.5.1+cu121", False), ("1.13.0", False), ("2.6.0", True), ("3.0.0a0+git12", True)]
)
def test_an_old_torch_gets_one_sentence(monkeypatch, version, new_enough):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__=version))
    sentence = rf"torch >= 2\.6.*{version.partition('+')[0]}.*run: pip install"
    with contextlib.nullcontext() if new_enough else pytest.raises(ImportError, match=sentence):
        compat.check_torch()


WRONG_APEX = {
    "raises TypeError": {"__init__.py": "raise TypeError('Class advice impossible in Python3.')\n"},
    "namespace": {"web/__init__.py": "\n"},
}
USE_ADAM = (
    "import fairseq_ms.optim\n"
    "from fairseq.optim.fused_adam import get_fused_adam_class\n"
    "from fairseq.modules.layer_norm import LayerNorm, has_fused_layernorm\n"
    "print(get_fused_adam_class(), has_fused_layernorm, LayerNorm(3))\n"
)


@pytest.mark.parametrize("kind", WRONG_APEX)
def test_a_wrong_apex_gets_one_warning_and_is_not_used(tmp_path, kind):
    write_package(tmp_path, "apex", WRONG_APEX[kind])
    done = run_cli("python", "-c", USE_ADAM, env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout.startswith("None False LayerNorm(")
    assert done.stderr.count("`apex` is not NVIDIA's") == 1
    assert "pip uninstall apex" in done.stderr
    assert "github.com/NVIDIA/apex" in done.stderr


def test_nvidia_apex_is_used_without_a_word(tmp_path):
    write_package(
        tmp_path,
        "apex",
        {
            "__init__.py": "",
            "optimizers/__init__.py": "from .fused_adam import FusedAdam\n",
            "optimizers/fused_adam.py": "import torch\nclass FusedAdam(torch.optim.Optimizer): pass\n",
            "multi_tensor_apply/__init__.py": "class multi_tensor_applier: available = True\n",
            "normalization/__init__.py": "import torch\nclass FusedLayerNorm(torch.nn.LayerNorm): pass\n",
        },
    )
    done = run_cli("python", "-c", USE_ADAM, env={"PYTHONPATH": str(tmp_path)})
    assert done.stderr == ""
    assert "FusedAdamV2" in done.stdout
    assert " True " in done.stdout


def test_registering_prints_nothing_and_leaves_logging_as_it_was():
    for configured in ("", "logging.basicConfig(level=logging.ERROR)"):
        program = f"import logging; {configured}\nroot = logging.getLogger(); before = root.handlers[:], root.level\n"
        program += "import fairseq_ms; fairseq_ms.register(); print((root.handlers, root.level) == before)"
        done = run_cli("python", "-c", program)
        assert (done.stdout, done.stderr) == ("True\n", "")


def test_what_newer_torch_says_of_fairseq_is_not_shown_to_its_users() -> None:
    """torch 2.14 warns in every command in which fairseq is imported; what others warn of is shown."""
    of_torch = "`torch.jit.script` is deprecated. Please switch to `torch.compile` or `torch.export`."
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        compat.silence_known_warnings()
        for message in (of_torch, "another"):
            warnings.warn(message, FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["another"]
