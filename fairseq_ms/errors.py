"""Errors that users cause: one sentence on stderr and a non-zero exit code instead of a traceback."""

import os
import re
import sys
from pathlib import Path
from types import TracebackType

_SPAWNED = re.compile(r"^fairseq_ms\.errors\.UsageError: (?P<sentence>.*)", re.MULTILINE)


class UsageError(ValueError):
    """Bad input: one sentence that names the flag (or the file), the rule and the value.

    Raise it wherever a user's value can break a rule. Uncaught in a fairseq command, it is printed as
    `fairseq-train: error: <sentence>`, exit code 1, without a traceback; every other exception keeps its own.
    """


def sentence_of(error: BaseException) -> str | None:
    """The one sentence to show for an error that the user caused, None for a bug that needs its traceback."""
    if isinstance(error, UsageError):
        # A data-loading worker hands its error on as the same class, with the whole traceback as its text.
        spawned = _SPAWNED.findall(str(error))
        return spawned[-1] if spawned else " ".join(str(error).split())
    # Training on several processes ends with an exception that quotes the traceback of the first that failed.
    if type(error).__name__ == "ProcessRaisedException":
        spawned = _SPAWNED.findall(str(error))
        return spawned[-1] if spawned else None
    return None


def install_hook() -> None:
    """Make uncaught `UsageError`s of this process end as one sentence; calling it again does nothing."""
    # hydra catches errors itself and prints a traceback of its own unless it is asked to let them pass.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    if getattr(sys.excepthook, "shows_usage_errors", False):
        return
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sentence = sentence_of(error)
        if sentence is None:
            previous(kind, error, trace)
            return
        sys.stdout.flush()
        print(f"{Path(sys.argv[0]).stem}: error: {sentence}", file=sys.stderr)

    show.shows_usage_errors = True  # type: ignore[attr-defined]
    sys.excepthook = show
