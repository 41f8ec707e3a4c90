"""What must hold before fairseq is imported: a torch and a fairseq that work, and NumPy's removed names."""

import importlib
import importlib.util
import sys
import types
import warnings

MIN_TORCH = (2, 6)
INSTALL_FAIRSEQ = "pip install --no-build-isolation fairseq-fixed==0.12.3.1"


def prepare() -> None:
    """Make `import fairseq` work and import it; raises ImportError with one sentence when that cannot be."""
    restore_numpy_names()
    check_torch()
    check_apex()
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
    """Warn once when a package named apex is installed that is not NVIDIA's."""
    if "apex" not in sys.modules and importlib.util.find_spec("apex") is None:
        return
    try:
        optimizers = importlib.import_module("apex.optimizers")
        genuine = hasattr(optimizers, "FusedAdam")
    except Exception:
        genuine = False
    if not genuine:
        warnings.warn(
            "the installed package `apex` is not NVIDIA's and is not used; uninstall it (pip uninstall apex),"
            " and if you want NVIDIA Apex build it from its sources at github.com/NVIDIA/apex",
            stacklevel=2,
        )


def check_fairseq() -> None:
    """Raise ImportError saying in one sentence what to run when fairseq is missing or broken."""
    try:
        importlib.import_module("fairseq")
    except ModuleNotFoundError as error:
        if error.name != "fairseq":
            raise ImportError(_broken(error)) from error
        raise ImportError(f"fairseq_ms needs fairseq, which is missing; run: {INSTALL_FAIRSEQ}") from None
    except Exception as error:
        raise ImportError(_broken(error)) from error


def _broken(error: Exception) -> str:
    reason = " ".join(str(error).split())
    kind = type(error).__name__
    return f"the installed fairseq cannot be imported ({kind}: {reason}); run: {INSTALL_FAIRSEQ}"
