"""The command line `fairseq-ms`: lists the commands, loads the one asked for, reports its errors."""

import argparse
import errno
import importlib
import sys
import traceback
from collections.abc import Sequence

from fairseq_ms.errors import UsageError
from fairseq_ms.host.errors import TRACEBACK, sentence_of, traceback_wanted

PROG = "fairseq-ms"

# What the user types -> (module, one line of help). `fairseq_ms.analysis` says what the module has to define.
COMMANDS: dict[str, tuple[str, str]] = {
    "bench": (
        "fairseq_ms.analysis.bench",
        "measure memory and time against naive twins and other implementations (needs a checkout)",
    ),
    "coarse-completions": (
        "fairseq_ms.analysis.coarse_completions",
        "print the bag of words that coarse_lm checkpoints predict after a context",
    ),
    "config": (
        "fairseq_ms.analysis.config",
        "print a preset, with its paper's recipe for training, as a configuration for fairseq-hydra-train",
    ),
    "context-length": (
        "fairseq_ms.analysis.context_length.command",
        "minimum, maximum and average context length of a streaming model, by formula and measured",
    ),
    "context-shuffle": (
        "fairseq_ms.analysis.context_shuffle",
        "increase in NLL when the distant context is shuffled, reversed, replaced or dropped",
    ),
    "context-window": (
        "fairseq_ms.analysis.context_window",
        "perplexity against the number of context tokens a model is given",
    ),
    "export": (
        "fairseq_ms.export.command",
        "write a checkpoint as a folder that Hugging Face's transformers loads without fairseq",
    ),
    "lm-eval": (
        "fairseq_ms.harness.lm_eval",
        "run lm-evaluation-harness, with checkpoints as its model fairseq_ms",
    ),
    "lm-eval-task": (
        "fairseq_ms.harness.lm_eval_task",
        "write a task of lm-evaluation-harness over a text file",
    ),
    "memory": (
        "fairseq_ms.analysis.memory.command",
        "memory of a training step by part and purpose, measured; --fit GIB finds allocations of layers that fit",
    ),
    "neighbors": (
        "fairseq_ms.analysis.neighbors",
        "nearest segments of a corpus by the representations of every scale",
    ),
    "nll-by-frequency": (
        "fairseq_ms.analysis.nll_by_frequency",
        "mean NLL of tokens in bins of equal training frequency, rarest first",
    ),
    "perplexity": (
        "fairseq_ms.analysis.perplexity",
        "evaluate a checkpoint: subword and word perplexity, bits per byte",
    ),
    "plot": (
        "fairseq_ms.analysis.plot.command",
        "draw a figure: attention, which blocks a model looks at; context, what a streaming model pays for it; "
        "curves, losses of training runs",
    ),
    "prepare": (
        "fairseq_ms.analysis.prepare",
        "prepare a data set: tokenised, split, segmented and binarised",
    ),
    "recall": (
        "fairseq_ms.analysis.recall.command",
        "accuracy of recalling a symbol by its distance, beside the context by formula",
    ),
    "sample-images": (
        "fairseq_ms.analysis.sample_images",
        "draw 32 x 32 images from a model of pixels, and complete given ones, as a PNG grid",
    ),
    "sample-metrics": (
        "fairseq_ms.analysis.sample_metrics.command",
        "perplexity under other models, reference BLEU, repetition and speed of samples",
    ),
    "tradeoff": (
        "fairseq_ms.analysis.tradeoff",
        "perplexity against memory or time of training, over a folder of runs",
    ),
    "user-dir": (
        "fairseq_ms.analysis.user_dir",
        "print the absolute path of the plugin, for fairseq's --user-dir",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, 2 for bad input, 130 when interrupted. A bug keeps its traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
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
    listing = "\n".join(f"  {name:<{width}}  {help}" for name, (_, help) in COMMANDS.items())
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


def _run(name: str, arguments: list[str]) -> int:
    """Import the command's module, parse its arguments, register the models if it needs them, and run it."""
    path, help = COMMANDS[name]
    module = importlib.import_module(path)
    # No abbreviations: a flag of fairseq's must never be taken for the beginning of one of the command's.
    parser = argparse.ArgumentParser(prog=f"{PROG} {name}", description=help, allow_abbrev=False)
    parser.set_defaults(command=name)
    module.add_arguments(parser)
    if getattr(module, "PASSES_ON", False) and arguments[:1] not in (["-h"], ["--help"]):
        parser.set_defaults(passed_on=arguments)
        arguments = []
    args, unknown = parser.parse_known_args(arguments)
    if getattr(module, "TAKES_FAIRSEQ_FLAGS", False):
        args.fairseq_flags = unknown
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if getattr(module, "NEEDS_FAIRSEQ", True):
        import fairseq_ms
        from fairseq_ms.host import compat

        try:
            compat.prepare()
        except ImportError as error:
            raise UsageError(str(error)) from error
        fairseq_ms.register()
    return int(module.run(args))
