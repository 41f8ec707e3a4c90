"""What commands tell newcomers: the help of every flag, and what a path or a model should have been."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairseq_ms import cli


def flags() -> Iterator[tuple[str, argparse.Action]]:
    """Every flag of every command, with the command's name."""
    for name in cli.COMMANDS:
        actions = cli.parser_of(name)._actions
        yield from ((name, action) for action in actions if action.option_strings and action.dest != "help")


def test_every_help_says_what_a_flag_does_and_then_its_default_once() -> None:
    wrong = []
    for name, action in flags():
        help = (action.help or "").replace("%(default)s", str(action.default))
        has_one = action.default not in (None, False, [], argparse.SUPPRESS) or action.const not in (None, True)
        needed = has_one and not action.required
        if help.startswith(("(default", "default")) or help.count("default") > 1 or (needed and "default" not in help):
            wrong.append(f"{name} {action.option_strings[0]}: {help}")
    assert wrong == []


@pytest.mark.parametrize(
    ("files", "rest"),
    [
        (None, "does not exist"),
        ([], "is a folder without a checkpoint"),
        (["checkpoint_last.pt"], "is a folder: did you mean {}/checkpoint_last.pt?"),
        (["checkpoint_1_2.pt", "checkpoint_best.pt"], "is a folder: did you mean {}/checkpoint_best.pt?"),
        (["checkpoint3.pt"], "is a folder: did you mean {}/checkpoint3.pt?"),
    ],
)
def test_a_path_that_is_no_file_is_told_what_it_is(files: list[str] | None, rest: str, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    for file in files or []:
        folder.mkdir(exist_ok=True)
        (folder / file).touch()
    if files == []:
        folder.mkdir()
    sentence = f"CHECKPOINT must be a file that fairseq-train wrote: {folder} {rest.format(folder)}"
    for command in (["perplexity", str(folder)], ["context-shuffle", f"mine={folder}"]):
        assert cli.main(command) == 2
        assert capsys.readouterr().err == f"fairseq-ms: {sentence}\n"
