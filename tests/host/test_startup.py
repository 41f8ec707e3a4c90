"""What is replaced in fairseq: the whole list, and each of it once."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

import fairseq_ms
from fairseq_ms import errors
from fairseq_ms.host import startup, trainer
from tests.helpers.cli import ROOT


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> list:
    """As in a process of fairseq-interactive, which imports fairseq-generate and replaces three more than others."""
    import fairseq_cli.interactive  # noqa: F401

    return startup.targets()


def test_what_is_replaced_in_fairseq_is_replaced_once_and_the_page_lists_it(targets: list) -> None:
    count = Counter(f"{owner.__name__}.{name}" for owner, name, _ in targets)
    assert set(count.values()) == {1}
    page = (ROOT / "docs" / "host.md").read_text(encoding="utf-8")
    assert not [name for _, name, _ in targets if f"{name}`" not in page]


def test_what_is_registered_again_is_replaced_no_further() -> None:
    fairseq_ms.register()
    for owner, name, around in startup.targets():
        found: Any = vars(owner)[name]
        found = found.__func__ if isinstance(found, staticmethod) else found
        if getattr(owner, "__name__", "") in ("fairseq_cli.generate", "fairseq_cli.interactive"):
            continue  # replaced only in its own process
        if around is trainer.Trainer:
            assert found is trainer.Trainer
        else:
            assert not hasattr(found.__wrapped__, "__wrapped__") or "fairseq_ms" not in found.__wrapped__.__module__
            assert found.__closure__ is not None
            assert around in [cell.cell_contents for cell in found.__closure__]
    assert sys.excepthook is errors.show
