"""Flags of all `fairseq-ms` commands: one name a meaning, and the names that they once had."""

from __future__ import annotations

import argparse
import importlib
from collections import defaultdict
from collections.abc import Iterator

import pytest

from fairseq_ms import cli
from fairseq_ms.commands import prepare

# Command, what a flag was called or is spelled by others, its name, and a value.
HIDDEN = [
    ("sample-images data --path p --png f", "--split", "--gen-subset", "test"),
    ("plot curves log", "--subset", "--gen-subset", "train"),
    ("context-shuffle a.pt", "--windows", "--limit", "9"),
    ("context-shuffle a.pt", "--context-window", "--damaged", "8"),
    ("context-window a.pt", "--targets", "--limit", "9"),
    ("context-window a.pt", "--context", "--contexts", "1,2"),
    ("coarse-completions a.pt", "--context", "--text", "two words"),
    ("sample-metrics a.pt", "--context", "--prefix-size", "9"),
    ("neighbors a.pt", "--segment", "--tokens-per-sample", "9"),
    ("neighbors a.pt", "--count", "--top", "9"),
    ("memory", "--show", "--top", "9"),
    ("plot context", "--dim", "--decoder-embed-dim", "32"),
    ("plot context", "--streams", "--batch-size", "2"),
    ("config preset", "--updates", "--max-update", "9"),
    ("export a.pt out", "--symbols", "--level", "word"),
    ("export a.pt out", "--tokenize", "--tokenise", "none"),
    ("export a.pt out", "--licence", "--license", "mit"),
    ("export a.pt out", "--data-licence", "--data-license", "mit"),
    ("prepare text --out o", "--tokenize", "--tokenise", "none"),
    ("prepare chars --out o", "--unit", "--level", "byte"),
    ("prepare recall --out o", "--task", "--exercise", "pairs"),
]


class Parsed(Exception):
    """A parser of `prepare`, in place of what it would go on to do."""


def parser_of(words: list[str]) -> argparse.ArgumentParser:
    """The parser of a command, or of a data set of `prepare`."""
    if words[0] == "prepare":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", _hand_over)
            with pytest.raises(Parsed) as caught:
                importlib.import_module(f"fairseq_ms_pipeline.datasets.{words[1]}").main()
        return caught.value.args[0]
    return cli.parser_of(cli.split(words)[0])


def _hand_over(self: argparse.ArgumentParser, *args: object) -> None:
    raise Parsed(self)


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for name in cli.COMMANDS:
        several = [f"prepare {data}" for data in prepare.datasets()] if name == "prepare" else [name]
        yield from ((one, parser_of(one.split())) for one in several)


def kind_of(action: argparse.Action) -> str:
    """What a flag takes: nothing, a number, several, or text."""
    if action.nargs == 0:
        return "nothing"
    name = getattr(action.type, "__name__", "str")
    return {"int": "number", "float": "number", "positive": "number", "positive_list": "numbers"}.get(name, "text")


@pytest.fixture(scope="module")
def shown() -> dict[str, dict[str, str]]:
    """Of every flag that a help shows: command -> kind of value."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, parser in parsers():
        for action in parser._actions:
            for flag in action.option_strings if action.help != argparse.SUPPRESS else ():
                found[flag][name] = kind_of(action)
    return found


def test_a_name_takes_one_kind_of_value_in_all_commands(shown: dict[str, dict[str, str]]) -> None:
    several = {flag: kinds for flag, kinds in shown.items() if len(set(kinds.values())) > 1}
    assert not several


@pytest.mark.parametrize(("command", "old", "new", "value"), HIDDEN)
def test_an_old_name_does_what_the_new_one_does_and_no_help_shows_it(
    command: str, old: str, new: str, value: str
) -> None:
    words = command.split()
    parser = parser_of(words)
    given = words[2:] if words[0] == "prepare" else cli.split(words)[1]
    one, other = (vars(parser.parse_args([*given, flag, value])) for flag in (old, new))
    assert one == other
    assert one != vars(parser.parse_args([*given, *(["--input", "f"] if command.startswith("coarse") else [])]))
    help = parser.format_help()
    assert f"{new} " in help
    assert f"{old} " not in help
    assert f"{old}," not in help
