"""Packages that lie beside the environment."""

import sys

import pytest

from tests.helpers.beside import library


@pytest.fixture(scope="package", autouse=True)
def _beside(tmp_path_factory: pytest.TempPathFactory):
    """pyarrow, datasets and tokenizers can be imported."""
    folders = [str(library(name, tmp_path_factory.getbasetemp())) for name in ("lm-eval", "transformers-5")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, *folders])
        yield
