"""What loads the plugin and what does not: each way in a process of its own, where fairseq is loaded or not."""

import argparse
import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import ROOT, USER_DIR, run_cli

# A module of every room of the plugin.
ROOMS = (
    *("criterions.bag_of_words", "data.streams", "harness.generation", "host.trainer"),
    *("lm.base", "models.retina", "optim.of_torch", "tasks.streaming_language_modeling"),
)
# For what is not loaded by its path.
HERE = f"sys.path.insert(0, {str(ROOT)!r})"


def in_processes(fairseq: str, ways: list[str]) -> list[Any]:
    """What ``registered`` says after each way, in a process forked from one that has torch, and ``fairseq``."""
    # This process has set it.
    program = "import os; os.environ.pop('HYDRA_FULL_ERROR', None)\n"
    program += f"import torch\n{fairseq}\nfrom tests.install.test_registering import fork\nfork()"
    printed = run_cli("python", "-c", program, json.dumps(ways)).stdout
    # fairseq says of a folder that it is loaded already.
    return [json.loads(line) for line in printed.splitlines() if line.startswith("[")]


def fork() -> None:
    """Go each way of the command line in a process of its own, from a folder that is not on the path."""
    for way in json.loads(sys.argv[1]):
        if not (child := os.fork()):
            sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
            exec(way)
            print(json.dumps(registered()), flush=True)
            os._exit(0)
        assert not os.waitpid(child, 0)[1], way


def user_dir(*spellings: str) -> None:
    """Load the plugin as fairseq's commands do."""
    from fairseq import utils

    for spelling in spellings:
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


@pytest.mark.parametrize("fairseq", ["", "import fairseq_cli.train, fairseq_cli.hydra_train"])
def test_the_core_loads_and_changes_nothing_of_fairseq_whether_it_comes_before_or_after(fairseq: str) -> None:
    ways = [f"{HERE}; changes_nothing({module!r})" for module in ("fairseq_ms", "fairseq_ms.core")]
    for own, replaced, loaded, hook, hydra in in_processes(fairseq, ways):
        assert (own, replaced, loaded, hook, hydra) == ([[]] * 5, [], [], "sys", None)


@pytest.mark.parametrize("fairseq", ["", "import fairseq_cli.train"])
def test_every_way_to_load_the_plugin_registers_everything_once(fairseq: str, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere" / "fairseq_ms"
    link.parent.mkdir()
    link.symlink_to(USER_DIR, target_is_directory=True)
    ways = [
        f"user_dir({str(USER_DIR)!r})",
        f"{HERE}; import fairseq_ms.core; fairseq_ms.register(); user_dir({str(USER_DIR)!r})",
        f"{HERE}; import fairseq_ms.{ROOMS[0]}",
    ]
    if fairseq:
        # Where it is loaded already, a way takes no time.
        ways += [
            f"os.chdir({str(ROOT)!r}); user_dir('fairseq_ms', './fairseq_ms/')",
            f"os.chdir({str(tmp_path)!r}); user_dir({str(link)!r}, {str(link)!r}, 'elsewhere/fairseq_ms')",
            f"os.chdir({str(ROOT)!r}); import fairseq_ms.models; user_dir('fairseq_ms')",
            *(f"{HERE}; import fairseq_ms.{room}" for room in ROOMS[1:]),
        ]
    found = in_processes(fairseq, ways)
    expected = json.loads(json.dumps(registered()))
    assert all(expected[0])
    assert {tuple(row[1:]) for row in expected[1]} == {(1, False), (0, True)}
    assert expected[2:] == [["fairseq_ms.host.compat"], "fairseq_ms.errors", "1"]
    for way, registries in zip(ways, found, strict=True):
        assert registries == expected, way
