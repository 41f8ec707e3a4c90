"""Documentation from the standard library's source files, without importing any of them."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

# Tests, bundled third-party packages and tools are not documentation of the library.
PASSED_OVER = frozenset(
    [
        "test",
        "tests",
        "idlelib",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "lib2to3",
        "turtledemo",
        "ensurepip",
        "_vendor",
    ]
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Shorter parts ("See also:") may stand in many modules; longer ones would tell the test split's text.
REPEATABLE_WORDS = 7


def library_folder() -> Path:
    """The folder of the standard library's Python files; ValueError when this Python has none."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not folder.is_dir():
        raise ValueError(f"this Python has no standard library in files ({folder} is no folder).")
    return folder


def modules(folder: Path) -> list[tuple[str, Path]]:
    """Dotted names and files of all modules, sorted by name."""
    found = []
    for file in folder.rglob("*.py"):
        parts = file.relative_to(folder).with_suffix("").parts
        if not PASSED_OVER.intersection(parts) and not parts[0].startswith(("config-", "_sysconfigdata")):
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append((name, file))
    return sorted(found)


def docstrings(source: bytes) -> Iterator[str]:
    """All docstrings of a module's source in the order they stand there."""
    with warnings.catch_warnings():
        # Old escape sequences in somebody else's source are no concern of the reader.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


def topics(source: bytes) -> dict[str, str]:
    """The help topics in the source of `pydoc_data.topics`: a dictionary of literals."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return ast.literal_eval(node.value)
    return {}


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of prose as one line each; code examples keep their lines."""
    for block in re.split(r"\n[ \t]*\n", inspect.cleandoc(text)):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if any(line.startswith((">>>", "...")) for line in lines):
            yield from lines
        elif lines:
            yield " ".join(lines)


def corpus(folder: Path, parts: Callable[[str], Iterator[str]] = paragraphs) -> dict[str, list[str]]:
    """The documentation of each module (and help topic), cut into ``parts``, only the first of equal ones."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()

    def add(name: str, texts: Iterator[str]) -> None:
        fresh = []
        for text in texts:
            for part in parts(text):
                if len(part.split()) > REPEATABLE_WORDS:
                    if part in seen:
                        continue
                    seen.add(part)
                fresh.append(part)
        if fresh:
            found[name] = fresh

    for name, file in modules(folder):
        source = file.read_bytes()
        if name == "pydoc_data.topics":
            for topic, text in sorted(topics(source).items()):
                add(f"{name}.{topic}", iter([text]))
        else:
            try:
                add(name, docstrings(source))
            except (SyntaxError, UnicodeDecodeError):
                # A template or a file for another Python; the library imports no such module either.
                continue
    return found


def split_by_module(texts: dict[str, list[str]], seed: int, fraction: float) -> dict[str, str]:
    """``split_by_size`` of modules by the bytes of their lines."""
    return split_by_size(
        {name: sum(len(line.encode()) + 1 for line in lines) for name, lines in texts.items()}, seed, fraction
    )


def split_by_size(sizes: dict[str, int], seed: int, fraction: float, few: bool = False) -> dict[str, str]:
    """A split for each name: in an order drawn by `seed`, valid and test are filled up to `fraction` of all bytes.

    With `few` they take turns, and one that stays empty takes the smallest name of train, as does one less than half
    full where that name is not four times too large: three names do for three splits.
    """

    def drawn(name: str) -> bytes:
        return hashlib.blake2b(f"{seed}:{name}".encode(errors="surrogateescape"), digest_size=8).digest()

    wanted = fraction * sum(sizes.values())
    filled = {"valid": 0, "test": 0}

    def emptier_first() -> list[str]:
        return sorted(filled, key=lambda split: filled[split])

    splits = {}
    for name in sorted(sizes, key=drawn):
        # What is too large for what is left to fill belongs to the training text.
        order = emptier_first() if few else filled
        split = next((s for s in order if filled[s] + sizes[name] <= 1.05 * wanted), "train")
        if split != "train":
            filled[split] += sizes[name]
        splits[name] = split
    for split in emptier_first() if few else ():
        train = [name for name in splits if splits[name] == "train"]
        smallest = min(train, key=lambda name: sizes[name])
        too_little = wanted / 2 if sizes[smallest] <= 4 * wanted else 1
        if filled[split] < too_little and len(train) > 1:
            splits[smallest] = split
    return splits
