"""The command line `fairseq-ms`: finds the subcommands, loads the one asked for, reports its errors."""

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROG = "fairseq-ms"
ROOMS = ("commands", "analysis")


@dataclass(frozen=True)
class Command:
    """A subcommand as it is listed: its name, its line of help and the module that holds it."""

    name: str
    help: str
    module: str


def find_commands() -> dict[str, Command]:
    """All subcommands by name, read from the source text so that no command's imports are paid for."""
    commands: dict[str, Command] = {}
    for room in ROOMS:
        for path in sorted((Path(__file__).parent / room).glob("*.py")):
            constants = _string_constants(path)
            if "NAME" not in constants or "HELP" not in constants:
                continue
            command = Command(constants["NAME"], constants["HELP"], f"fairseq_ms.{room}.{path.stem}")
            other = commands.setdefault(command.name, command)
            if other is not command:
                raise RuntimeError(f"{other.module} and {command.module} are both named {command.name!r}")
    return dict(sorted(commands.items()))


def _string_constants(path: Path) -> dict[str, str]:
    """The top-level `NAME = "literal"` assignments of a source file."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    found[target.id] = node.value.value
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code, 2 for bad input, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = find_commands()
    overview = _overview(commands)
    if not arguments or arguments[0].startswith("-"):
        overview.parse_args(arguments)
        overview.print_help(sys.stderr)
        return 2
    name, rest = arguments[0], arguments[1:]
    if name not in commands:
        known = ", ".join(commands)
        print(f"{PROG}: there is no command {name!r}; the commands are {known}", file=sys.stderr)
        return 2
    try:
        return _run(commands[name], rest)
    except KeyboardInterrupt:
        return 130
    except (ValueError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"{PROG}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _overview(commands: dict[str, Command]) -> argparse.ArgumentParser:
    """The parser of `fairseq-ms` without a subcommand: its help and its version."""
    from fairseq_ms.version import __version__

    width = max(len(name) for name in commands)
    listing = "\n".join(f"  {command.name:<{width}}  {command.help}" for command in commands.values())
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} COMMAND ...",
        description="Tools around the language models of fairseq_ms.",
        epilog=f"commands:\n{listing}\n\n{PROG} COMMAND --help describes one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fairseq_ms {__version__}")
    return parser


def _run(command: Command, arguments: list[str]) -> int:
    """Import the command's module, parse its arguments, register the models if it needs them, and run it."""
    module = importlib.import_module(command.module)
    # No abbreviations: a flag of fairseq's must never be taken for the beginning of one of the command's.
    parser = argparse.ArgumentParser(prog=f"{PROG} {command.name}", description=command.help, allow_abbrev=False)
    module.add_arguments(parser)
    args, unknown = parser.parse_known_args(arguments)
    if getattr(module, "TAKES_FAIRSEQ_FLAGS", False):
        args.fairseq_flags = unknown
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if getattr(module, "NEEDS_FAIRSEQ", True):
        import fairseq_ms

        fairseq_ms.register()
    return int(module.run(args))
