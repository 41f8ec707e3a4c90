"""What the tests of the core do without: fairseq, and everything else but torch, numpy and pytest."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    """Nothing is registered."""
