"""Definitions are moved into one file by what they use."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from fairseq_ms.export import sources
from fairseq_ms.export.folder import modeling
from fairseq_ms.export.sources import CannotCollect, Name, collected
from tests.registry import ARCHITECTURES, random_case


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write modules of a package that counts as our own."""
    monkeypatch.setattr(sources, "OWN", (*sources.OWN, "collected_package"))
    monkeypatch.syspath_prepend(str(tmp_path))
    sources.read.cache_clear()
    folder = tmp_path / "collected_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")

    def write(**modules: str) -> None:
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)

    yield write
    sources.read.cache_clear()
    for name in [name for name in sys.modules if name.startswith("collected_package")]:
        del sys.modules[name]


def run(text: str, folder: Path) -> dict:
    """The names of a module that is imported from a file."""
    path = folder / "a_collected_module.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def test_what_a_root_does_not_use_stays_behind(package, tmp_path: Path) -> None:
    package(
        low='"""Low."""\nimport math\nimport fairseq\n\n# The half.\nHALF = math.pi / 2\n\n\ndef unused():\n'
        "    return fairseq\n",
        high='"""High."""\nfrom collected_package.low import HALF, unused\n\n\ndef root():\n    return 2 * HALF\n',
    )
    text = collected([Name("collected_package.high", "root")], "Doc.", {})
    names = run(text, tmp_path)
    assert names["root"]() == pytest.approx(3.14159265)
    assert "unused" not in names
    assert "# The half." in text
    assert "fairseq" not in text


def test_definitions_of_one_name_are_told_apart(package, tmp_path: Path) -> None:
    package(
        one="def _step(x):\n    return x + 1\n\n\ndef one(x):\n    return _step(x)\n",
        two="from collected_package.one import one\n\n\ndef _step(x):\n    return one(x) * 10\n\n\n"
        "def two(x):\n    return _step(x)\n",
    )
    names = run(collected([Name("collected_package.two", "two")], "Doc.", {}), tmp_path)
    assert names["two"](2) == 30


def test_something_of_fairseqs_is_refused(package) -> None:
    package(model="from fairseq.models import FairseqEncoder\n\n\nclass Root(FairseqEncoder):\n    pass\n")
    with pytest.raises(CannotCollect, match="FairseqEncoder is needed"):
        collected([Name("collected_package.model", "Root")], "Doc.", {})


def test_annotations_may_name_what_is_fairseqs(package, tmp_path: Path) -> None:
    package(
        model="from __future__ import annotations\nfrom fairseq.data import Dictionary\n\nSize = int\n\n\n"
        "def root(words: Dictionary) -> Size:\n    return len(words)\n"
    )
    text = collected([Name("collected_package.model", "root")], "Doc.", {})
    assert run(text, tmp_path)["root"]([1, 2]) == 2
    assert "Size = int" in text
    assert "import Dictionary" not in text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_file_of_every_model_imports_nothing_of_fairseqs_and_of_ours(arch: str) -> None:
    core = random_case(arch, 0).model.decoder.core
    text = modeling(type(core), type(core.config), "made")
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("" if node.level else str(node.module).partition(".")[0])
    assert imported <= {*sys.stdlib_module_names, "torch", "transformers", ""}
