"""Multi-scale and long-memory language models for fairseq, loaded with `--user-dir fairseq_ms`.

`fairseq_ms.core` holds the models in plain PyTorch and needs nothing but torch. Where fairseq is installed, importing
the package also registers every model, preset, task and criterion with it, and patches what `docs/host.md` lists.
fairseq itself looks only into `models/` and `tasks/` of a user directory, and into nothing at all when the package was
imported before, so the registration does not depend on who imports the package or how.

Shapes, in the whole package: B batch, T tokens, C coarse positions, S keys, N heads, H head dim, D model dim,
V vocabulary; `x_BTD` is a tensor of shape (B, T, D).
"""

from importlib.util import find_spec

from fairseq_ms.host.startup import in_own_command, register_all
from fairseq_ms.version import __version__

__all__ = ["__version__", "register"]

if __name__ != "fairseq_ms":
    raise ImportError(f"the folder given to --user-dir must be called fairseq_ms, and not {__name__}")


def register() -> None:
    """Register everything with fairseq; calling it again does nothing.

    Raises ImportError with one sentence saying what to run when fairseq is missing or cannot be imported.
    """
    register_all()


if find_spec("fairseq") is not None and not in_own_command():
    register()
