"""Tiny models of transformers, made once by each pinned version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.beside import library
from tests.importing.cases import VERSIONS

MAKING = Path(__file__).with_name("making.py")


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of models for each version; here, safetensors can be imported from one of them."""
    folders = {version: tmp_path_factory.mktemp(version) for version in VERSIONS}
    for version, folder in folders.items():
        beside = str(library(version, tmp_path_factory.getbasetemp()))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([beside, str(MAKING.parents[2])]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(MAKING), str(folder)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(version[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, beside])
        yield folders
