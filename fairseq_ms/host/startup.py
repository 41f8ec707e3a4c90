"""What happens when the package is imported."""

import importlib
import pkgutil
import sys
from pathlib import Path

PACKAGE = "fairseq_ms"
# Each has an ``install()`` that may be called again.
PATCHES = (
    "errors",
    "flags",
    "user_dir",
    "launching",
    "precision",
    "uneven",
    "context_window",
    "resuming",
    "writing",
    "optimizers",
    "refusals",
    "damage",
    "best",
    "stopping",
    "buffering",
    "data_files",
    "same_data",
    "ensembles",
    "training_checks",
    "interactive",
)
REGISTERING = ("criterions", "optim", "tasks", "models", "presets")


def register_all() -> None:
    """Make fairseq importable, patch it, and import all that registers with it."""
    from fairseq_ms.host import compat

    compat.prepare()
    for patch in PATCHES:
        importlib.import_module(f"{PACKAGE}.host.{patch}").install()
    for room in REGISTERING:
        package = importlib.import_module(f"{PACKAGE}.{room}")
        for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
            importlib.import_module(f"{package.__name__}.{module}")


def in_own_command() -> bool:
    """Whether this process is the console script `fairseq-ms` or `python -m fairseq_ms`, and fairseq is not loaded.

    That command line imports torch and fairseq only for the subcommands that need them, so that
    `fairseq-ms user-dir` answers at once, even where fairseq is missing.
    """
    if "fairseq" in sys.modules:
        return False
    program = sys.argv[0] if sys.argv else ""
    # While `python -m` looks for its module, and imports the package around it, the program is called "-m".
    if program == "-m":
        return ["-m", PACKAGE] in [sys.orig_argv[place : place + 2] for place in range(1, len(sys.orig_argv))]
    return Path(program).stem == "fairseq-ms"
