"""Flags of all `fairseq-ms` commands: one name a meaning, and the names that they once had."""

from __future__ import annotations

import argparse
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairseq_ms import cli
from fairseq_ms.commands import prepare

# Of every command, what its flags were called or are spelled by others.
HIDDEN = {
    "sample-images": "--split",
    "plot curves": "--subset",
    "context-shuffle": "--windows --context-window",
    "context-window": "--targets --context",
    "coarse-completions": "--context",
    "sample": "--max-new-tokens --top-k --top-p",
    "sample-metrics": "--context",
    "neighbors": "--segment --count",
    "memory": "--show",
    "plot context": "--dim --streams",
    "config": "--updates",
    "export": "--symbols --tokenize --licence --data-licence",
    "prepare text": "--tokenize",
    "prepare chars": "--unit",
    "prepare recall": "--task",
}


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
    numbers = dict.fromkeys(("int", "float", "positive", "seed"), "number")
    return {**numbers, "positive_list": "numbers"}.get(name, "text")


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


def test_an_empty_path_which_would_be_the_folder_one_is_in_is_refused() -> None:
    refused = set()
    for name, parser in parsers():
        for action in parser._actions:
            if action.type is Path or action.dest in ("data", "path", "checkpoint", "checkpoints", "runs", "hf_lm"):
                with pytest.raises(argparse.ArgumentError, match="must not be empty"):
                    parser._get_value(action, "")
                refused.add((name.split()[0], action.dest))
    assert refused >= {("prepare", "input"), ("prepare", "out"), ("export", "out"), ("perplexity", "data")}


def test_an_old_name_is_another_of_a_flag_and_no_help_shows_it() -> None:
    found = {}
    for name, parser in parsers():
        hidden = [action for action in parser._actions if action.help == argparse.SUPPRESS]
        found[name] = {flag for action in hidden for flag in action.option_strings}
        for old in hidden:
            (new,) = (action for action in parser._actions if action.dest == old.dest and action not in hidden)
            for what in ("type", "nargs", "const", "choices"):
                assert getattr(old, what) == getattr(new, what), (name, old.option_strings)
            assert old.default == argparse.SUPPRESS
    assert {name: flags for name, flags in found.items() if flags} == {
        name: set(flags.split()) for name, flags in HIDDEN.items()
    }
