"""Every script and configuration under user_dir_examples/, found by glob and read by the real commands."""

import importlib.util
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig, OmegaConf

from fairseq_ms import cli
from fairseq_ms.cli import main
from fairseq_ms.tools import untrained
from tests.helpers.cli import ROOT, USER_DIR, run_cli
from tests.helpers.corpus import large_data
from tests.helpers.forked import train
from tests.helpers.hydra import build_everything, composed

EXAMPLES = ROOT / "user_dir_examples"
CONFIGS = sorted(EXAMPLES.glob("**/*.yaml"))
SHELL = sorted(EXAMPLES.glob("**/*.sh"))
PYTHON = sorted(EXAMPLES.glob("**/*.py"))
# Larger than the greatest cutoff of an adaptive softmax.
VOCABULARY = 270_000


def name(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_the_hydra_command_reads_the_ready_configuration_of_every_paper(path):
    command = ["fairseq-hydra-train", "--config-dir", str(path.parent), "--config-name", path.stem]
    cfg = job(*command, f"common.user_dir={USER_DIR}", "task.data=here")
    assert cfg.task.data == "here"
    assert cfg.model == OmegaConf.load(path).model


def invocations(path: Path) -> list[list[str]]:
    """The examples in a script's first comment: lines such as ``train.sh ARCH data --fp16`` without placeholders."""
    found = []
    for line in itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()):
        match = re.fullmatch(rf"# {{3}}{re.escape(path.name)} (.+)", line)
        if match and not re.search(r"\b[A-Z_]{3,}\b|\[", match[1]):
            found.append(shlex.split(match[1]))
    return found


def recorded(path: Path, arguments: list[str], folder: Path) -> list[list[str]]:
    """The commands that a script runs, each as its arguments; fairseq-ms user-dir alone is really answered."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for program in ("fairseq-train", "fairseq-eval-lm", "fairseq-hydra-train", "fairseq-ms", "torchrun", "srun"):
        recorder = programs / program
        recorder.write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            f"if sys.argv[1:] == ['user-dir']:\n    print({str(USER_DIR)!r})\nelse:\n"
            f"    print(json.dumps([{program!r}, *sys.argv[1:]]), file=open({str(folder / 'log')!r}, 'a'))\n"
            "    print('Perplexity: 20.00')\n"
        )
        recorder.chmod(0o755)
    log = folder / "log"
    log.write_text("")
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run(["bash", path, *arguments], env=environment, cwd=folder, check=True, timeout=60)
    return [json.loads(line) for line in log.read_text().splitlines()]


def job(*command: str) -> DictConfig:
    """What fairseq-hydra-train would train, printed by a process that has the libraries already."""
    with tempfile.TemporaryDirectory() as place:
        train([*command, "--cfg", "job"], Path(place) / "log")
        printed = (Path(place) / "log").read_text()
    # After what hydra warns of.
    (configuration,) = re.findall(r"^(?:_name|common):.*", printed, re.MULTILINE | re.DOTALL)
    return OmegaConf.create(configuration)


def parse(command: list[str]) -> None:
    """Read the flags of a command as it would itself, down to building the model it is about to train."""
    program, *arguments = command
    if program == "fairseq-train":
        parser = options.get_training_parser(default_task="language_modeling")
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))
        untrained.build_model(cfg, VOCABULARY, device="meta")
    elif program == "fairseq-eval-lm":
        options.parse_args_and_arch(options.get_eval_lm_parser("language_modeling"), arguments)
    elif program == "fairseq-hydra-train":
        cfg = job(program, *arguments)
        assert OmegaConf.missing_keys(cfg) == set()
        build_everything(composed(cfg), 300)
    else:
        assert program == "fairseq-ms", program
        parse_ours(arguments)
        if arguments[0] == "config":  # which a later command reads
            data = Path(arguments[arguments.index("--data") + 1])
            if not data.exists():
                large_data(data.parent, targets=4_300_000_000, sentences=140_000)
            assert main(arguments) == 0


def parse_ours(arguments: list[str]) -> None:
    name, rest = cli.split(arguments)
    known, unknown = cli.parser_of(name).parse_known_args(rest)
    if hasattr(known, "fairseq_flags") and unknown:
        untrained.build(unknown, 100, device="meta")
    else:
        assert unknown == []


@pytest.mark.parametrize("path", SHELL, ids=name)
def test_the_examples_of_a_shell_script_run_commands_that_parse(path, tmp_path):
    examples = invocations(path)
    assert examples, f"the first comment of {name(path)} must give an example of its use"
    for arguments in examples:
        commands = recorded(path, arguments, tmp_path)
        assert commands
        for command in commands:
            parse(command)


@pytest.mark.parametrize("path", SHELL, ids=name)
def test_a_shell_script_without_arguments_prints_its_usage(path):
    done = subprocess.run(["bash", path], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_a_python_script_compiles_and_explains_its_flags(path, capsys, monkeypatch):
    text = path.read_text(encoding="utf-8")
    compile(text, str(path), "exec")
    if "argparse" not in text:
        return
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    # As Python does where it starts a script; its neighbours are not those of another folder's.
    monkeypatch.syspath_prepend(path.parent)
    known = set(sys.modules)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    for imported in (set(sys.modules) - known) & {beside.stem for beside in path.parent.glob("*.py")}:
        monkeypatch.delitem(sys.modules, imported)
    assert stop.value.code == 0
    assert "usage: " in capsys.readouterr().out


def loaded(folder: str, script: str):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"{folder}_{script}", EXAMPLES / folder / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demos_analyses_parse_and_leave_no_capital_unfilled(tmp_path):
    module = loaded("demo", "analysis")
    for analysis in module.ANALYSES:
        words = module.arguments(analysis, tmp_path)
        parse_ours(words)
        assert not any(word.isupper() for word in words)


def test_the_demos_analyses_without_a_trained_demo_say_what_to_run_first(tmp_path):
    done = run_cli("python", EXAMPLES / "demo" / "analysis.py", tmp_path, check=False)
    assert done.returncode == 1
    assert "run make demo first" in done.stderr


@pytest.mark.slow
def test_the_trainings_of_recall_parse(tmp_path):
    module = loaded("recall", "run")
    for group in module.GROUPS.values():
        for model, stage in itertools.product(group.models, range(len(group.stages))):
            command = module.training(group, model, stage, tmp_path)
            parse(command)
            assert stage == 0 or str(module.checkpoint(tmp_path, model, stage - 1)) in command
