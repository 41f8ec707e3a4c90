"""Our modules become files of one folder, and these import nothing but each other and what is installed there."""

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fairseq_ms import core
from fairseq_ms.export import sources
from fairseq_ms.export.folder import modeling
from fairseq_ms.tools.tokenizing import LEVELS, Pipeline, classes_of
from tests.registry import ARCHITECTURES, random_case

# Files of models.
MODELS = {sources.file_of(getattr(core, name).__module__) for name in core.__all__ if hasattr(core, f"{name}Config")}


def imported(files: dict[str, str]) -> set[str]:
    """The packages that files import; each file that they name is one of them."""
    packages = set()
    for node in (node for text in files.values() for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level or node.module in files
            packages |= set() if node.level else {str(node.module).partition(".")[0]}
    return packages - set(sys.stdlib_module_names)


def test_imports_are_followed_and_rewritten_and_nothing_else_changes(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "fairseq_ms_toy" / "deep"
    package.mkdir(parents=True)
    low = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from fairseq_ms_toy.high import Root\n\n"
    low += "def half(x: 'Root'):\n    return x / 2  # from fairseq_ms_toy.high import\n"
    high = (
        "import math\n\nfrom fairseq_ms_toy.deep.low import (\n    half,\n)\n\nclass Root:\n    value = half(math.pi)\n"
    )
    (package / "low.py").write_text(low)
    (package / "unused.py").write_text("")
    (package.parent / "high.py").write_text(high)
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "exported_toy"
    out.mkdir()
    sources.write(out, "entry", [("fairseq_ms_toy.high", "Root")], "class Own(Root):\n    pass\n")
    assert {file.name for file in out.iterdir()} == {"entry.py", "toy_high.py", "toy_deep_low.py"}
    copied = (out / "toy_deep_low.py").read_text().split("\n", 1)[1]
    assert copied == low.replace("    from fairseq_ms_toy.high", "    from .toy_high")
    assert import_module("exported_toy.entry").Own.value == pytest.approx(1.57079633)
    # transformers 4.57 does not look for what the files beside name.
    assert "from .toy_deep_low import" in (out / "entry.py").read_text()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_needs_torch_and_transformers_alone(arch: str) -> None:
    model = random_case(arch, 0).model.decoder.core
    files = sources.copies([module for module, _ in modeling(type(model), type(model.config))[0]])
    assert imported(files) == {"torch", "transformers"}
    # Of the models, it has those that it derives from or is made of.
    parts = [kind.__module__ for kind in type(model).__mro__]
    own = {*map(sources.file_of, parts), *(["core_topdown"] if arch == "coarse_lm" else [])}
    assert MODELS & files.keys() <= own
    assert len(files) <= 25


@pytest.mark.parametrize("tokenise", ["moses", "none"])
@pytest.mark.parametrize("level", sorted({*LEVELS} - {"hf_byte_bpe"}))
def test_a_tokenizer_needs_the_packages_of_its_pipeline_alone(level: str, tokenise: str) -> None:
    pipeline = Pipeline(level, tokenise, "en", None)
    classes = classes_of(pipeline, ("fairseq_ms.export.hf.tokenization", "LineTokenizer"))
    packages = {package.replace("-", "_") for package in pipeline.packages}
    assert imported(sources.copies([module for module, _ in classes])) == {"transformers", *packages}
