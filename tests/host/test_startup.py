"""What is replaced in fairseq: the whole list, and each of it once."""

from __future__ import annotations

from collections import Counter

from fairseq_ms.host import startup
from tests.helpers.cli import ROOT


def test_what_is_replaced_in_fairseq_is_replaced_once_and_the_page_lists_it() -> None:
    """As in a process of fairseq-interactive, which imports fairseq-generate and replaces three more than others."""
    import fairseq_cli.interactive  # noqa: F401

    targets = startup.targets()
    count = Counter(f"{owner.__name__}.{name}" for owner, name, _ in targets)
    assert set(count.values()) == {1}
    page = (ROOT / "docs" / "host.md").read_text(encoding="utf-8")
    assert not [name for _, name, _ in targets if f"{name}`" not in page]
