"""The command line `fairseq-ms`: lists the commands, loads the one asked for, reports its errors."""

import argparse
import difflib
import errno
import importlib
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from fairseq_ms.errors import TRACEBACK, missing_package, parser_sentence, sentence_of, traceback_wanted
from fairseq_ms.tools import report
from fairseq_ms_pipeline import flags

PROG = "fairseq-ms"

# Where commands lie, each in a file of its name; `fairseq_ms.commands` says what that has to define.
ROOMS = ("commands", "papers")


def _found() -> Iterator[tuple[str, str]]:
    """Every command and its module: ``user_dir.py`` is "user-dir", ``plot/attention.py`` "plot attention".

    ``import_.py`` is "import", which is a word of Python's.
    """
    here = Path(__file__).parent
    for room in ROOMS:
        for file in (here / room).rglob("[!_]*.py"):
            words = file.relative_to(here / room).with_suffix("").parts
            yield " ".join(words).rstrip("_").replace("_", "-"), ".".join(("fairseq_ms", room, *words))


COMMANDS = dict(sorted(_found()))
"""The modules of all commands."""

PURPOSES = {
    "from a text to a model that writes, in this order": (
        *("prepare", "train", "perplexity", "sample", "export", "config"),
    ),
    "what a model costs, and how well it does": ("memory", "bench", "lm-eval", "lm-eval-task"),
    "what a model looks at": ("context-window", "plot attention"),
    "for fairseq's own commands": ("user-dir",),
}
OTHERS = "the papers' analyses and figures"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, 2 for bad input, 130 when interrupted. A bug keeps its traceback.

    Where nobody reads on, as in `fairseq-ms ... | head`, it ends in silence with 141, as a shell's own commands do.
    """
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # What Python flushes at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _main(arguments: list[str]) -> int:
    # Threads that wait for each other awake take the processor from other programs; torch reads it when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Where a terminal reports a size of 0, tqdm would draw no bar; it reads these when it is loaded.
    for name, size in zip(("TQDM_NCOLS", "TQDM_NROWS"), shutil.get_terminal_size(), strict=True):
        os.environ.setdefault(name, str(size))
    name, rest = split(arguments)
    if not name:
        return _without_command(arguments)
    try:
        return _run(name, rest)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        sentence = sentence_of(error) or _unreadable(error) or missing_package(error, name)
        if sentence is None:
            raise
        if traceback_wanted():
            traceback.print_exc()
        print(f"{PROG}: {sentence}", file=sys.stderr)
        return 2


def split(arguments: list[str]) -> tuple[str, list[str]]:
    """The command that the arguments begin with, which may be two words, or "", and what follows it."""
    known = (words for words in (1, 2) if " ".join(arguments[:words]) in COMMANDS)
    words = next(known, 0)
    return " ".join(arguments[:words]), arguments[words:]


def _unreadable(error: Exception) -> str | None:
    """The sentence for a file that the system does not read or write; None for any other error."""
    if not isinstance(error, OSError) or (error.filename is None and error.errno != errno.ENOSPC):
        return None
    return f"{error.filename or 'a file'} cannot be read or written: {error.strerror}"


def _without_command(arguments: list[str]) -> int:
    """Show the help, of all commands or of those that a first word has in common, or say that there is no such one."""
    from fairseq_ms.version import __version__

    group = "".join(arguments[:1])
    among = [name for name in COMMANDS if name.startswith(f"{group} ")]
    words, rest = ([PROG, group], arguments[1:]) if among else ([PROG], arguments)
    if rest and not rest[0].startswith("-"):
        wrong = " ".join([*words[1:], rest[0]])
        near = difflib.get_close_matches(wrong, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        print(f"{PROG}: there is no command {wrong!r}; {hint}", file=sys.stderr)
        return 2
    width = max(map(len, COMMANDS))
    purposes = {"commands": among} if among else _by_purpose()
    listing = "\n\n".join(
        "\n".join([f"{purpose}:", *(f"  {name:<{width}}  {help_of(name)}" for name in names)])
        for purpose, names in purposes.items()
    )
    parser = Parser(
        prog=" ".join(words),
        usage=f"{' '.join(words)} COMMAND ...",
        description="Tools around the language models of fairseq_ms.",
        epilog=f"{listing}\n\n{PROG} COMMAND --help describes one of them; with {TRACEBACK}=1 in the "
        "environment,\na refused command also prints where it was refused.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fairseq_ms {__version__}")
    parser.parse_args(rest)
    parser.print_help(sys.stderr)
    return 2


def _by_purpose() -> dict[str, list[str]]:
    """All commands, those that matter first by the order in which they are used, and the papers' last."""
    found: dict[str, list[str]] = {purpose: list(names) for purpose, names in PURPOSES.items()}
    listed = {name for names in found.values() for name in names}
    found[OTHERS] = [name for name in COMMANDS if name not in listed]
    return found


def help_of(name: str) -> str:
    """A command in one line, the first of its module's docstring."""
    return str(importlib.import_module(COMMANDS[name]).__doc__).partition("\n")[0].removesuffix(".")


class Parser(flags.Parser):
    """Says of a mistake one sentence, without its usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROG}: {parser_sentence(message, self)}\n")


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    # No abbreviations: a flag of fairseq's must never be taken for the beginning of one of the command's.
    parser = Parser(prog=f"{PROG} {name}", description=help_of(name), allow_abbrev=False)
    parser.set_defaults(command=name)
    importlib.import_module(COMMANDS[name]).add_arguments(parser)
    return parser


def _run(name: str, arguments: list[str]) -> int:
    """Parse the command's arguments and run it."""
    parser, module = parser_of(name), importlib.import_module(COMMANDS[name])
    if getattr(module, "PASSES_ON", False) and arguments[:1] not in (["-h"], ["--help"]):
        parser.set_defaults(passed_on=arguments)
        arguments = []
    args, unknown = parser.parse_known_args(arguments)
    if hasattr(args, "fairseq_flags"):
        args.fairseq_flags, args.own_flags = unknown, [*parser._option_string_actions]
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    report.check_outputs(args)
    return int(module.run(args) or 0)
