"""Names of before are still names of the same things."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("modules.transformer", "core.layers"),
        ("modules.pooling", "core.pooling"),
        *((f"ops.{name}", f"core.ops.{name}") for name in ("attention", "linear", "recompute", "window_attention")),
        ("ops.relative_attention", "core.ops.relative_attention"),
    ],
)
def test_the_older_name_of_a_module_is_the_module(old: str, new: str) -> None:
    assert importlib.import_module(f"fairseq_ms.{old}") is importlib.import_module(f"fairseq_ms.{new}")
