"""Python files of an exported folder: our modules as they stand, one beside the other.

transformers fetches the files that relative imports name, and no packages. So a module becomes a file that is named
after its whole path, and lines that import another module of ours name that one's file. Nothing else changes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fairseq_ms.version import __version__

_IMPORT = re.compile(r"^( *from )(fairseq_ms[\w.]*)(?= import )", re.MULTILINE)


def file_of(module: str) -> str:
    """The name of a module's file without ``.py``: ``core_ops_linear`` for ``fairseq_ms.core.ops.linear``."""
    return re.sub(r"^fairseq_ms(\.export)?[._]", "", module).replace(".", "_")


def copies(roots: Sequence[str]) -> dict[str, str]:
    """The text of each module and of all that they import from ours, by the name of its file."""
    found: dict[str, str] = {}
    pending = list(roots)
    while pending:
        module = pending.pop()
        if file_of(module) not in found:
            spec = find_spec(module)
            assert spec is not None
            text = Path(str(spec.origin)).read_text(encoding="utf-8")
            head = f"# {module} of fairseq_ms {__version__}, with the imports of a single folder.\n"
            found[file_of(module)] = head + _IMPORT.sub(lambda line: f"{line[1]}.{file_of(line[2])}", text)
            pending += [line[2] for line in _IMPORT.finditer(text)]
    return dict(sorted(found.items()))


def write(folder: Path, entry: str, imports: Sequence[tuple[str, str]], text: str) -> None:
    """Write ``ENTRY.py``, which imports names from modules of ours and goes on with a text, and copies of these.

    Args:
        imports: a module and a name to import from it, several times
    """
    named: dict[str, list[str]] = {}
    for module, name in imports:
        named.setdefault(module, []).append(name)
    files = copies(list(named))
    lines = [f"from .{file_of(module)} import {', '.join(names)}" for module, names in named.items()]
    others = [f"    from .{name} import *" for name in files if name not in map(file_of, named)]
    reason = "    # transformers 4.57 fetches only the files that this one names."
    head = ["from typing import TYPE_CHECKING", "", *lines, "", "if TYPE_CHECKING:", reason, *others]
    files[entry] = f"# Written by fairseq-ms export {__version__}.\n\n" + "\n".join(head) + f"\n\n\n{text}"
    for name, content in files.items():
        (folder / f"{name}.py").write_text(content, encoding="utf-8")
