"""What must hold around fairseq: a torch and a fairseq that work, NumPy's removed names, and a quiet screen."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairseq_ms.errors import INSTALL_FAIRSEQ
from fairseq_ms.host import uncompiled

MIN_TORCH = (2, 6)
# Messages that nobody who uses this package can act on: category, and beginning as a regular expression.
_KNOWN: tuple[tuple[type[Warning], str], ...] = (
    # fairseq compiles functions when it is imported; torch 2.14 says more loudly than before that this will go.
    (FutureWarning, r"`torch\.jit\.script` is deprecated"),
    # fairseq builds its configuration through hydra's 1.0 interface in every command.
    (UserWarning, r"hydra\.experimental\.(initialize|compose)\(\) is no longer experimental"),
    (UserWarning, r"\s*The version_base parameter is not specified"),
    (UserWarning, r"In '.*': Usage of deprecated keyword in package header '# @package _group_'"),
    (UserWarning, r"\s*'.*' is validated against ConfigStore schema with the same name"),
    (UserWarning, r"\s*The strict flag in the compose API is deprecated"),
    # fairseq spells autocast and AMP's scaler in the old way, which does the same as the new one.
    (FutureWarning, r"`torch\.cuda\.amp\.(autocast|GradScaler)\(args\.\.\.\)` is deprecated"),
    # fairseq asks for pinned memory whatever the device; without one, torch pins nothing, which is right.
    (UserWarning, r"'pin_memory' argument is set as true but no accelerator is found"),
    # fairseq's own attention (its transformer_lm, trained here for comparison) mixes kinds of masks.
    (UserWarning, r"Support for mismatched key_padding_mask and attn_mask is deprecated"),
)


def prepare() -> None:
    """Make `import fairseq` work and import it; raises ImportError with one sentence when that cannot be."""
    check_torch()
    restore_numpy_names()
    hide_wrong_apex()
    silence_known_warnings()
    with logging_untouched():
        if "fairseq" not in sys.modules:
            check_fairseq()
        uncompiled.stand_in()


def check_torch() -> None:
    """Raise ImportError unless torch loads checkpoints safely by default (2.6 and later)."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        raise ImportError(
            f"fairseq_ms needs torch >= 2.6, and this is torch {torch.__version__}; "
            "run: pip install --upgrade 'torch>=2.6'"
        )


def restore_numpy_names() -> None:
    """Give `numpy.compat.long` back where NumPy 2 removed it.

    It was Python's int. fairseq takes it for a dtype where a block is a sentence, as in `fairseq-interactive`.
    """
    import numpy

    if not hasattr(numpy, "compat"):
        module = types.ModuleType("numpy.compat", "The part of numpy.compat that fairseq uses.")
        module.long = int  # type: ignore[attr-defined]
        numpy.compat = module  # type: ignore[attr-defined]


def hide_wrong_apex() -> None:
    """Warn of an installed package `apex` that is not NVIDIA's, and keep fairseq from importing it.

    The unrelated package of that name can raise anything. It is told apart by its files, without running them.
    """
    spec = None if "apex" in sys.modules else importlib.util.find_spec("apex")
    folders = (spec and spec.submodule_search_locations) or []
    if spec is None or any((Path(folder) / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        return
    warnings.warn(
        "the installed package `apex` is not NVIDIA's and is not used; uninstall it (pip uninstall apex),"
        " and if you want NVIDIA Apex build it from its sources at github.com/NVIDIA/apex",
        stacklevel=2,
    )
    # None makes `import apex` raise ImportError, which is what fairseq is prepared for.
    sys.modules["apex"] = None  # type: ignore[assignment]


def check_fairseq() -> None:
    """Raise ImportError saying in one sentence what to run when fairseq is missing or broken."""
    try:
        importlib.import_module("fairseq")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "fairseq":
            raise ImportError(f"fairseq_ms needs fairseq, which is missing; run: {INSTALL_FAIRSEQ}") from None
        reason = " ".join(str(error).split())
        raise ImportError(
            f"the installed fairseq cannot be imported ({type(error).__name__}: {reason}); "
            f"run: pip uninstall fairseq && {INSTALL_FAIRSEQ}"
        ) from None


def silence_known_warnings() -> None:
    """Ignore the warnings listed above; filters that the user sets later come first and win."""
    for category, message in _KNOWN:
        warnings.filterwarnings("ignore", message=message, category=category)
    # fairseq sets the root logger to DEBUG in some of its commands, and hydra then reports its bookkeeping.
    hydra = logging.getLogger("hydra")
    if hydra.level == logging.NOTSET:
        hydra.setLevel(logging.INFO)


@contextmanager
def logging_untouched() -> Iterator[None]:
    """Undo what importing fairseq does to the program's logging.

    Some of its modules set the root logger to DEBUG on stderr, and one logs that an optional package is missing.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    silent = logging.NullHandler()
    root.addHandler(silent)  # logging.basicConfig does nothing on a logger that has a handler
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
