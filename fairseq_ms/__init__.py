"""Multi-scale and long-memory language models for fairseq, loaded with `--user-dir fairseq_ms`.

Importing the package registers every model, task and criterion with fairseq. fairseq itself looks only into
`models/` and `tasks/` of a user directory, and into nothing at all when the package was imported before, so
the registration is done here and does not depend on who imports the package or how.

Shapes, in the whole package: B batch, T tokens, C coarse positions, S keys, N heads, H head dim, D model dim,
V vocabulary; `x_BTD` is a tensor of shape (B, T, D).
"""

import importlib
import pkgutil
import sys
from pathlib import Path

from fairseq_ms.version import __version__

__all__ = ["__version__", "register"]

if __name__ != "fairseq_ms":
    raise ImportError(f"the folder given to --user-dir must be called fairseq_ms, and not {__name__}")


class _SamePlaces(list[str]):
    """A package path in which the same folder under another name, such as a symlink, counts as contained.

    fairseq refuses a `--user-dir` whose package was imported from another path; the path of a symlink to this
    very folder is not another package.
    """

    def __contains__(self, path: object) -> bool:
        if super().__contains__(path):
            return True
        here = Path(__file__).resolve().parent
        return isinstance(path, str) and Path(path).resolve() == here


__path__ = _SamePlaces(__path__)


def register() -> None:
    """Register every model, task and criterion with fairseq; calling it again does nothing.

    Raises ImportError with one sentence saying what to run when fairseq is missing or cannot be imported.
    """
    from fairseq_ms import errors
    from fairseq_ms.host import compat

    compat.prepare()
    errors.install_hook()
    for patch in ("host.context_window", "host.resuming", "host.ensembles", "host.training_checks"):
        importlib.import_module(f"{__name__}.{patch}").install()
    for kind in ("criterions", "tasks", "models", "presets"):
        package = importlib.import_module(f"{__name__}.{kind}")
        for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
            importlib.import_module(f"{package.__name__}.{module}")


def _started_as_own_command() -> bool:
    """Whether this process is the console script `fairseq-ms` or `python -m fairseq_ms`.

    That command line imports torch and fairseq only for the subcommands that need them, so that
    `fairseq-ms user-dir` answers at once, even where fairseq is missing.
    """
    program = sys.argv[0] if sys.argv else ""
    # While `python -m` looks for its module, and imports the package around it, the program is called "-m".
    if program == "-m":
        return ["-m", __name__] in [sys.orig_argv[place : place + 2] for place in range(1, len(sys.orig_argv))]
    return Path(program).stem == "fairseq-ms"


if "fairseq" in sys.modules or not _started_as_own_command():
    register()
