"""What must hold before fairseq is imported: a torch and a fairseq that work, and NumPy's removed names."""

import importlib
import importlib.util
import sys
import types
import warnings
from pathlib import Path

from fairseq_ms.host import quiet

MIN_TORCH = (2, 6)
INSTALL_FAIRSEQ = (
    "pip install cython wheel 'setuptools<81' && "
    "pip install --no-build-isolation --no-binary fairseq-fixed fairseq-fixed==0.12.3.1"
)


def prepare() -> None:
    """Make `import fairseq` work and import it; raises ImportError with one sentence when that cannot be."""
    check_torch()
    restore_numpy_names()
    check_apex()
    quiet.silence_known_warnings()
    if "fairseq" not in sys.modules:
        with quiet.logging_untouched():
            check_fairseq()


def restore_numpy_names() -> None:
    """Give `numpy.compat.long` back where NumPy 2 removed it.

    fairseq uses it as a dtype when a block of tokens is a sentence (break mode "eos"), which is how
    `fairseq-interactive` and `fairseq-generate` read their input. It always was Python's int.
    """
    import numpy

    if not hasattr(numpy, "compat"):
        module = types.ModuleType("numpy.compat", "The part of numpy.compat that fairseq uses.")
        module.long = int  # type: ignore[attr-defined]
        numpy.compat = module  # type: ignore[attr-defined]


def check_torch() -> None:
    """Raise ImportError unless torch is there and loads checkpoints safely by default (2.6 and later)."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"fairseq_ms needs torch, which cannot be imported ({error}); run: pip install 'torch>=2.6'"
        ) from None
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        raise ImportError(
            f"fairseq_ms needs torch >= 2.6, and this is torch {torch.__version__}; "
            "run: pip install --upgrade 'torch>=2.6'"
        )


def check_apex() -> None:
    """Warn once when the installed package `apex` is not NVIDIA's, and keep fairseq from importing it.

    fairseq falls back to torch only when importing Apex raises ImportError, and the unrelated package of that
    name can raise anything. It is told apart by its files, without running them.
    """
    if "apex" in sys.modules:
        spec = getattr(sys.modules["apex"], "__spec__", None)
    else:
        spec = importlib.util.find_spec("apex")
    if spec is None:
        return
    folders = spec.submodule_search_locations or []
    if any((Path(folder) / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        return
    warnings.warn(
        "the installed package `apex` is not NVIDIA's and is not used; uninstall it (pip uninstall apex),"
        " and if you want NVIDIA Apex build it from its sources at github.com/NVIDIA/apex",
        stacklevel=2,
    )
    # None makes `import apex` raise ImportError, which is what fairseq is prepared for.
    sys.modules.setdefault("apex", None)  # type: ignore[arg-type]


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
