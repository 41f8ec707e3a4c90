"""Multi-scale and long-memory language models for fairseq, loaded with `--user-dir fairseq_ms`.

`fairseq_ms.core` holds the models in plain PyTorch and needs nothing but torch: importing it touches no fairseq. The
rooms of the plugin (`models`, `tasks`, `harness` and so on) register everything with fairseq when one of them is
imported, as `--user-dir` does, and patch what `docs/host.md` lists.

Shapes, in the whole package: B batch, T tokens, C coarse positions, S keys, N heads, H head dim, D model dim,
V vocabulary; `x_BTD` is a tensor of shape (B, T, D).
"""

import os

from fairseq_ms.version import __version__

__all__ = ["__version__", "register"]

if __name__ != "fairseq_ms":
    raise ImportError(f"the folder given to --user-dir must be called fairseq_ms, and not {__name__}")
# fairseq knows a user directory by its path: a link's is another than that which it leads to.
if os.path.realpath(__path__[0]) not in __path__:
    __path__.append(os.path.realpath(__path__[0]))


def register() -> None:
    """Register everything with fairseq; calling it again does nothing.

    Raises ImportError with one sentence saying what to run when fairseq is missing or cannot be imported.
    """
    from fairseq_ms.host.startup import register_all

    register_all()
