"""The corpus of tiny trainings."""

from pathlib import Path

import pytest

from tests.helpers.resumed import write_parts


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folder of its first part, which no test may change."""
    return write_parts(tmp_path_factory.mktemp("corpus"))[:1]


@pytest.fixture(scope="package")
def data(folders: list[Path]) -> Path:
    """The same folder by itself."""
    return folders[0]
