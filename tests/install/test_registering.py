"""What loads the plugin and what does not: each way in a process of its own, where fairseq is loaded or not."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.cli import ROOT, USER_DIR, run_cli
from tests.install import loading

# A module of every room of the plugin.
ROOMS = (
    *("criterions.bag_of_words", "data.streams", "harness.generation", "host.trainer"),
    *("lm.base", "models.retina", "optim.of_torch", "tasks.streaming_language_modeling"),
)
HERE = ("find", str(ROOT))


def in_processes(first: list[str], ways: list[loading.Way]) -> list[Any]:
    """What is registered after each way, in a process forked from one that has torch and the ``first`` modules."""
    with mock.patch.dict(os.environ):
        # This process has set it.
        os.environ.pop("HYDRA_FULL_ERROR", None)
        printed = run_cli("python", str(Path(loading.__file__)), json.dumps([["torch", *first], ways])).stdout
    # fairseq says of a folder that it is loaded already.
    return [json.loads(line) for line in printed.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("first", [[], ["fairseq_cli.train", "fairseq_cli.hydra_train"]])
def test_the_core_loads_and_changes_nothing_of_fairseq_whether_it_comes_before_or_after(first: list[str]) -> None:
    ways = [[HERE, ("changes nothing", module)] for module in ("fairseq_ms", "fairseq_ms.core")]
    for own, replaced, loaded, hook, hydra in in_processes(first, ways):
        assert (own, replaced, loaded, hook, hydra) == ([[]] * 5, [], [], "sys", None)


@pytest.mark.parametrize("first", [[], ["fairseq_cli.train"]])
def test_every_way_to_load_the_plugin_registers_everything_once(first: list[str], tmp_path: Path) -> None:
    link = tmp_path / "elsewhere" / "fairseq_ms"
    link.parent.mkdir()
    link.symlink_to(USER_DIR, target_is_directory=True)
    by_path, by_link, by_name = (("user dir", path) for path in (str(USER_DIR), str(link), "fairseq_ms"))
    ways = [
        [by_path],
        [HERE, ("import", "fairseq_ms.core"), ("call", "register"), by_path],
        [HERE, ("import", f"fairseq_ms.{ROOMS[0]}")],
    ]
    if first:
        # Where it is loaded already, a way takes no time.
        ways += [
            [("enter", str(ROOT)), by_name, ("user dir", "./fairseq_ms/")],
            [("enter", str(tmp_path)), by_link, by_link, ("user dir", "elsewhere/fairseq_ms")],
            [HERE, ("enter", str(ROOT)), ("import", "fairseq_ms.models"), by_name],
            *([HERE, ("import", f"fairseq_ms.{room}")] for room in ROOMS[1:]),
        ]
    found = in_processes(first, ways)
    own, replaced, *_ = json.loads(json.dumps(loading.registered()))
    assert all(own)
    assert {tuple(row[1:]) for row in replaced} == {(1, False), (0, True)}
    # What shows errors in this process may be torch's, of a process group that another test has started.
    expected = [own, replaced, ["fairseq_ms.host.compat"], "fairseq_ms.errors", "1"]
    for way, registries in zip(ways, found, strict=True):
        assert registries == expected, way
