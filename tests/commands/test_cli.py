"""The command line `fairseq-ms`: listing commands, reporting errors, starting fast."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_ms import cli
from tests.helpers.cli import USER_DIR, run_cli


def test_user_dir_prints_the_path_of_the_package_and_imports_neither_torch_nor_fairseq():
    program = (
        "import sys, runpy\n"
        "sys.argv = ['fairseq-ms', 'user-dir']\n"
        "try:\n"
        "    runpy.run_module('fairseq_ms', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print(sorted({'torch', 'fairseq', 'numpy'} & set(sys.modules)))\n"
    )
    assert run_cli("python", "-c", program).stdout == f"{USER_DIR}\n[]\n"


@pytest.mark.parametrize("arguments", [["--help"], ["user-dir"], ["config", "--list"], ["perplexity", "--help"]])
def test_a_closed_pipe_ends_every_command_in_silence(arguments):
    command = [sys.executable, "-m", "fairseq_ms", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    # A help longer than the pipe's buffer is given up by argparse itself, which is no error to it.
    assert process.returncode in (0, 141)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("trian", "did you mean train?"),
        ("nonsense", "user-dir"),
        ("plot curve", "did you mean plot curves?"),
        ("--verson", "--version"),
        ("train", "fairseq-ms train --help"),
        ("prepare --bogus", "fairseq-ms prepare --help"),
        ("prepare text --out o --bogus", "fairseq-ms prepare text --help"),
        ("prepare text --out o --sufix=.md", "did you mean --suffix?"),
        ("perplexity a.pt --zzzzzz", "fairseq-ms perplexity (--help"),
        ("perplexity a.pt --gen-subst valid", "did you mean --gen-subset?"),
        ("memory --arch vanilla_lm --sweep 64,x", "must be a whole number of at least 1"),
        ("memory --arch retina_lm --batch 3", "did you mean --batch-size?"),
        ("memory --arch retina_lm --vocab 30", "did you mean --vocabulary?"),
        ("plot attention --arch retina_lm --lenth 9", "did you mean --length?"),
        ("context-length --arch transformer_xl --mesure", "did you mean --measure?"),
        ("sample a.pt --seed 99999999999999999999999", "--seed: must be a whole number from 0 to"),
        ("recall a.pt --seed -1", "--seed: must be a whole number from 0 to"),
        ("memory --arch vanilla_lm --batch-size 0", "must be a whole number of at least 1"),
    ],
)
def test_what_the_command_line_does_not_know_is_one_sentence_that_names_the_nearest(arguments, named, capsys):
    code: object
    try:
        code = cli.main(arguments.split())
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    assert (code, printed.out, printed.err.count("\n")) == (2, "", 1), printed
    assert named in printed.err


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown and cli.help_of(name) in shown for name in cli.COMMANDS)


NAMES = (
    "bench config export import lm-eval lm-eval-task memory perplexity prepare train user-dir context-window plot "
    "coarse-completions context-length context-shuffle neighbors nll-by-frequency recall sample sample-images "
    "sample-metrics tradeoff"
)


def test_the_commands_are_the_files_of_two_rooms_and_each_can_run():
    assert {name.split()[0] for name in cli.COMMANDS} == set(NAMES.split())
    assert {name for name in cli.COMMANDS if " " in name} == {"plot attention", "plot context", "plot curves"}
    assert all(callable(importlib.import_module(module).run) for module in cli.COMMANDS.values())


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 2), (["plot"], 2), (["plot", "--help"], 0), (["plot", "bars"], 2)]
)
def test_a_first_word_of_several_commands_lists_them(arguments, code, capsys):
    try:
        assert cli.main(arguments) == code
    except SystemExit as end:
        assert end.code == code  # noqa: PT017
    shown = "".join(capsys.readouterr())
    assert "plot curves" in shown
    assert ("'plot bars'" in shown) == ("bars" in arguments)


def test_the_help_of_every_command_is_shown_without_torch_or_fairseq():
    program = (
        "import sys\n"
        "from fairseq_ms import cli\n"
        "for name in cli.COMMANDS:\n"
        "    cli.parser_of(name).format_help()\n"
        "    heavy = {'torch', 'fairseq', 'matplotlib', 'sacrebleu', 'omegaconf'} & set(sys.modules)\n"
        "    assert not heavy, (name, heavy)\n"
        "print('all')"
    )
    assert run_cli("python", "-c", program).stdout == "all\n"


def test_without_fairseq_every_command_that_needs_it_says_how_to_install_it():
    given = ("memory --arch retina_lm", "plot attention --arch retina_lm", "plot context", "context-length --paper")
    several = ("context-window", "context-shuffle", "neighbors", "nll-by-frequency", "recall", "sample-metrics")
    commands = [*given, *(f"{name} CKPT" for name in several), "coarse-completions CKPT --text w", "tradeoff ."]
    commands += ["lm-eval --tasks t", "config --flags retina_lm", "sample-images . --path CKPT --png a.png"]
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.partition('.')[0] in ('fairseq', 'fairseq_cli'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from fairseq_ms import cli\n"
        "for command in sys.argv[1:]:\n"
        "    assert cli.main(command.replace('CKPT', sys.executable).split()) == 2, command\n"
    )
    said = run_cli("python", "-c", program, *commands).stderr.splitlines()
    assert len(said) == len(commands)
    assert all("pip install" in line and "fairseq-fixed" in line for line in said), said


@pytest.mark.parametrize("arguments", ["perplexity a.pt --json", "config haed_wt103 --out"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_the_work_and_stays_empty(arguments, tmp_path, capsys):
    assert cli.main([*arguments.split(), str(tmp_path)]) == 2
    flag = arguments.split()[-1]
    assert capsys.readouterr().err == f"fairseq-ms: {flag} must name a file: {tmp_path} is a folder\n"
    assert list(tmp_path.iterdir()) == []


def _with_command(monkeypatch, tmp_path, body):
    """Add a command `broken` whose run() has the given body."""
    room = tmp_path / "extra_room"
    room.mkdir()
    source = f"def add_arguments(p): pass\ndef run(a): {body}\n"
    (room / "broken_command.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(room))
    monkeypatch.setitem(cli.COMMANDS, "broken", "broken_command")
    monkeypatch.delitem(sys.modules, "broken_command", raising=False)


USAGE = "from fairseq_ms.errors import UsageError; raise UsageError('--n must be\\n positive, not -1')"
UNREADABLE = "fairseq-ms: none.txt cannot be read or written: No such file or directory\n"


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("return 3", 3, ""),
        ("raise KeyboardInterrupt", 130, ""),
        (USAGE, 2, "fairseq-ms: --n must be positive, not -1\n"),
        ("open('none.txt')", 2, UNREADABLE),
        ("import pathlib; pathlib.Path('none.txt').read_text()", 2, UNREADABLE),
        (
            "raise FileNotFoundError('Dataset not found: dev (data/dev)')",
            2,
            "fairseq-ms: DATA must be as fairseq-preprocess wrote it (Dataset not found: dev (data/dev))\n",
        ),
    ],
)
def test_a_command_ends_with_its_exit_code_or_a_mistake_in_one_line(monkeypatch, tmp_path, capsys, body, code, said):
    _with_command(monkeypatch, tmp_path, body)
    assert cli.main(["broken"]) == code
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("return {}['missing']", KeyError),
        ("return int('two')", ValueError),
        ("from os import nothing", ImportError),
        ("raise OSError('what a library says')", OSError),
    ],
)
def test_a_bug_in_a_command_keeps_its_traceback(monkeypatch, tmp_path, body, kind):
    _with_command(monkeypatch, tmp_path, body)
    with pytest.raises(kind):
        cli.main(["broken"])


def test_an_environment_variable_shows_the_traceback_of_a_mistake_as_well(monkeypatch, tmp_path, capsys):
    _with_command(monkeypatch, tmp_path, USAGE)
    monkeypatch.setenv("FAIRSEQ_MS_TRACEBACK", "1")
    assert cli.main(["broken"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert "broken_command.py" in shown
    assert shown.endswith("fairseq-ms: --n must be positive, not -1\n")


@pytest.mark.parametrize(
    "arguments",
    [["sample", "--prompt", "The"], ["perplexity", "--shipped"], ["lm-eval", "--tasks", "x"]],
    ids=lambda x: x[0],
)
def test_commands_whose_lengths_vary_turn_off_attention_that_is_planned_for_every_shape(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    class Asked(Exception):
        pass

    def asked(enabled: bool) -> None:
        raise Asked(enabled)

    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked)
    with pytest.raises(Asked, match="False"):
        cli.main(arguments)


def test_importing_the_core_leaves_the_kernels_of_attention_to_torch() -> None:
    program = "import torch, fairseq_ms.core.steps; print(torch.backends.cuda.cudnn_sdp_enabled())"
    assert run_cli("python", "-c", program).stdout == "True\n"


def test_help_has_every_command_once_and_the_six_that_matter_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = re.findall(r"^  ([a-z][a-z-]*(?: [a-z]+)?)  +[A-Z]", capsys.readouterr().out, re.MULTILINE)
    assert sorted(listed) == sorted(cli.COMMANDS)
    assert listed[:6] == ["prepare", "train", "perplexity", "sample", "export", "config"]


def test_config_says_what_it_wrote_and_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my own.yaml"
    assert cli.main(["config", "retina_lm_long_2048", "--out", str(file)]) == 0
    said, following = capsys.readouterr().out.splitlines()
    assert said == f"{file}: retina_lm_long_2048, whose checkpoints go to checkpoints/my own"
    assert following == f"next: fairseq-ms train '{file}' --data DATA"
