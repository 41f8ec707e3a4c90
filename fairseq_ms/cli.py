"""The command line `fairseq-ms`: lists the commands, loads the one asked for, reports its errors."""

import argparse
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType

from fairseq_ms.errors import TRACEBACK, sentence_of, traceback_wanted
from fairseq_ms.tools import flags
from fairseq_ms.tools.arguments import register

PROG = "fairseq-ms"

# One line of help for every command.
COMMANDS = {
    "bench": "measure memory and time against naive twins and other implementations (needs a checkout)",
    "coarse-completions": "print the bag of words that coarse_lm checkpoints predict after a context",
    "config": "print a preset, with its paper's recipe for training, as a configuration for fairseq-hydra-train",
    "context-length": "minimum, maximum and average context length of a streaming model, by formula and measured",
    "context-shuffle": "increase in NLL when the distant context is shuffled, reversed, replaced or dropped",
    "context-window": "perplexity against the number of context tokens a model is given",
    "export": "write a checkpoint as a folder that Hugging Face's transformers loads without fairseq",
    "lm-eval": "run lm-evaluation-harness, with checkpoints as its model fairseq_ms",
    "lm-eval-task": "write a task of lm-evaluation-harness over a text file",
    "memory": "memory of a training step by part and purpose, measured; --fit GIB finds allocations of layers that fit",
    "neighbors": "nearest segments of a corpus by the representations of every scale",
    "nll-by-frequency": "mean NLL of tokens in bins of equal training frequency, rarest first",
    "perplexity": "evaluate a checkpoint: subword and word perplexity, bits per byte",
    "plot": "draw a figure: attention, which blocks a model looks at; context, what a streaming model pays "
    "for it; curves, losses of training runs",
    "prepare": "prepare a data set: tokenised, split, segmented and binarised",
    "recall": "accuracy of recalling a symbol by its distance, beside the context by formula",
    "sample-images": "draw 32 x 32 images from a model of pixels, and complete given ones, as a PNG grid",
    "sample-metrics": "perplexity under other models, reference BLEU, repetition and speed of samples",
    "tradeoff": "perplexity against memory or time of training, over a folder of runs",
    "user-dir": "print the absolute path of the plugin, for fairseq's --user-dir",
}
# Where commands lie, each in a file of its name; `fairseq_ms.commands` says what that has to define.
ROOMS = ("fairseq_ms.commands", "fairseq_ms.papers")


def module_of(name: str) -> str:
    """The module that runs a command."""
    modules = [f"{room}.{name.replace('-', '_')}" for room in ROOMS]
    return next(module for module in modules if find_spec(module))


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
    overview = _overview()
    if not arguments or arguments[0].startswith("-"):
        overview.parse_args(arguments)
        overview.print_help(sys.stderr)
        return 2
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"{PROG}: there is no command {name!r}; the commands are {known}", file=sys.stderr)
        return 2
    try:
        return _run(name, rest)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        sentence = sentence_of(error) or _unreadable(error)
        if sentence is None:
            raise
        if traceback_wanted():
            traceback.print_exc()
        print(f"{PROG}: {sentence}", file=sys.stderr)
        return 2


def _unreadable(error: Exception) -> str | None:
    """The sentence for a file that the system does not read or write; None for any other error."""
    if not isinstance(error, OSError) or (error.filename is None and error.errno != errno.ENOSPC):
        return None
    return f"{error.filename or 'a file'} cannot be read or written: {error.strerror}"


def _overview() -> argparse.ArgumentParser:
    """The parser of `fairseq-ms` without a command: its help and its version."""
    from fairseq_ms.version import __version__

    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {help}" for name, help in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} COMMAND ...",
        description="Tools around the language models of fairseq_ms.",
        epilog=f"commands:\n{listing}\n\n{PROG} COMMAND --help describes one of them; with {TRACEBACK}=1 in the "
        "environment,\na refused command also prints where it was refused.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fairseq_ms {__version__}")
    return parser


def parser_of(name: str) -> tuple[argparse.ArgumentParser, ModuleType]:
    """The parser of a command, and the module that has its flags: `analysis.flags`, or where they are few its own."""
    apart = getattr(flags, name.replace("-", "_"), None)
    module = flags if apart else importlib.import_module(module_of(name))
    # No abbreviations: a flag of fairseq's must never be taken for the beginning of one of the command's.
    parser = argparse.ArgumentParser(prog=f"{PROG} {name}", description=COMMANDS[name], allow_abbrev=False)
    parser.set_defaults(command=name)
    (apart or module.add_arguments)(parser)
    return parser, module


def _run(name: str, arguments: list[str]) -> int:
    """Parse the command's arguments, register the models if it needs them, and run it."""
    parser, module = parser_of(name)
    if getattr(module, "PASSES_ON", False) and arguments[:1] not in (["-h"], ["--help"]):
        parser.set_defaults(passed_on=arguments)
        arguments = []
    args, unknown = parser.parse_known_args(arguments)
    if hasattr(args, "fairseq_flags"):
        args.fairseq_flags = unknown
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if getattr(module, "NEEDS_FAIRSEQ", True):
        register()
    return int(importlib.import_module(module_of(name)).run(args))
