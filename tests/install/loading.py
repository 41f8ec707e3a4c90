"""A program that loads the plugin in given ways, and prints after each what is registered."""

import argparse
import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

Way = list[tuple[str, str]]


def user_dir(spelling: str) -> None:
    """Load the plugin as fairseq's commands do."""
    from fairseq import utils

    utils.import_user_module(argparse.Namespace(user_dir=spelling))


def registered() -> list[Any]:
    """All that fairseq has of us, by registry, and what is replaced in it, and how often."""
    from fairseq import criterions, models, optim, tasks

    registries: list[dict[str, Any]] = [models.ARCH_MODEL_REGISTRY, models.MODEL_REGISTRY, tasks.TASK_REGISTRY]
    registries += [criterions.CRITERION_REGISTRY, optim.OPTIMIZER_REGISTRY]
    ours = "fairseq_ms."
    own = [sorted(name for name, kind in names.items() if kind.__module__.startswith(ours)) for names in registries]
    replaced = []
    # Importing it would register.
    startup = sys.modules.get("fairseq_ms.host.startup")
    for owner, name, around in startup.targets() if startup else ():
        depth, found = 0, getattr(owner, name)
        while hasattr(found, "__wrapped__"):
            depth, found = depth + 1, found.__wrapped__
        # Other programs may have been loaded by then or later.
        if not getattr(owner, "__name__", "").startswith("fairseq_cli.") or "train" in owner.__name__:
            replaced.append([name, depth, found is around])
    loaded = [name for name in sys.modules if name.endswith(".host.compat")]
    return [own, replaced, loaded, getattr(sys.excepthook, "__module__", ""), os.environ.get("HYDRA_FULL_ERROR")]


def look() -> list[Any]:
    """All that an import could change: every name in fairseq and its classes, and what is there but once."""
    known = ("fairseq", "fairseq_cli", "hydra", "omegaconf")
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in known]
    classes = [thing for module in modules for thing in vars(module).values() if isinstance(thing, type)]
    names = [(str(owner), name, id(thing)) for owner in modules + classes for name, thing in vars(owner).items()]
    root, numpy = logging.getLogger(), sys.modules["numpy"]
    once = sys.excepthook, dict(os.environ), [*warnings.filters], [*root.handlers], root.level
    return [names, once, hasattr(numpy, "compat"), "apex" in sys.modules]


def changes_nothing(module: str) -> None:
    """Importing the module, and torch for the first time, loads and changes nothing of fairseq."""
    before = look()
    importlib.import_module(module)
    assert look() == before


# The steps of a way, each with one argument. What is loaded by its path needs no "find".
STEPS: dict[str, Callable[[str], Any]] = {
    "find": lambda folder: sys.path.insert(0, folder),
    "enter": os.chdir,
    "import": importlib.import_module,
    "call": lambda name: getattr(sys.modules["fairseq_ms"], name)(),
    "user dir": user_dir,
    "changes nothing": changes_nothing,
}


def fork(first: list[str], ways: list[Way]) -> None:
    """Import modules, then go each way in a process forked from this one, which does not find the plugin by itself."""
    for module in first:
        importlib.import_module(module)
    # A link to it lies beside fairseq.
    linked = [path for path in sys.path if os.path.islink(os.path.join(path, "fairseq_ms"))]
    sys.path[:] = [path for path in sys.path if path in linked or not os.path.isdir(os.path.join(path, "fairseq_ms"))]
    for way in ways:
        if not (child := os.fork()):
            for step, argument in way:
                STEPS[step](argument)
            print(json.dumps(registered()), flush=True)
            os._exit(0)
        assert not os.waitpid(child, 0)[1], way


if __name__ == "__main__":
    fork(*json.loads(sys.argv[1]))
