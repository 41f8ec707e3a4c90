"""The core imports torch, Python's own library and itself."""

import ast
import re
import sys

from tests.helpers.cli import ROOT


def test_the_core_imports_torch_and_itself_alone():
    imported = set()
    for path in (ROOT / "fairseq_ms" / "core").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search("fairseq(?!_ms)", text), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, path
                imported.add(str(node.module))
    own = {name for name in imported if name.startswith("fairseq_ms")}
    assert all(name == "fairseq_ms.core" or name.startswith("fairseq_ms.core.") for name in own), own
    assert {name.partition(".")[0] for name in imported - own} <= {"torch", *sys.stdlib_module_names}
