"""Source code: whole folders in one split, equal files once, nothing of a line lost."""

from pathlib import Path

import pytest

from fairseq_ms_pipeline.datasets.code import NAMES, code, source_files
from fairseq_ms_pipeline.stdlib_docs import library_folder
from tests.preprocess import sample


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Forty folders, with a file that another has, one of another coding, and what is no source."""
    for number in range(40):
        folder = tmp_path / "tree" / f"f{number:02}" / ("inner" if number % 3 == 0 else "")
        folder.mkdir(parents=True)
        for name in ("a.py", "b.c"):
            (folder / name).write_text(
                f"def f_{number}():\n\treturn  {number}\n\n# {name}é\n", encoding="utf-8", newline="\n"
            )
    (folder / "again.py").write_bytes((tmp_path / "tree" / "f01" / "a.py").read_bytes())
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    (folder / "notes.txt").write_text("no source\n")
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "other.py").write_text("installed = 1\n")
    return tmp_path / "tree"


def test_a_folder_s_files_follow_one_another_in_one_split_and_of_equal_files_one_counts(tree: Path) -> None:
    lines = list(code(source_files([tree], NAMES), 1, 0.1, lambda count: None))
    assert len([line for line in lines if line.starts_document]) == 40
    by_number: dict[str, set[str]] = {}
    for line in lines:
        if line.text.startswith("def"):
            by_number.setdefault(line.text, set()).add(line.split)
    assert len(by_number) == 40
    assert all(len(splits) == 1 for splits in by_number.values())
    assert {split for splits in by_number.values() for split in splits} == {"train", "valid", "test"}
    assert [line.text for line in lines].count("def f_1():") == 2  # a.py and b.c
    assert not any("installed" in line.text or "no source" in line.text for line in lines)


def test_prepared_code_is_the_text_as_it_is(tree: Path, tmp_path: Path) -> None:
    sample.prepare("code", "--input", tree, "--bpe-merges", "20", "--out", tmp_path / "out")
    text = (tmp_path / "out" / "text" / "train.txt").read_text(encoding="utf-8")
    assert "\treturn  7\n\n# a.pyé\n" in text or "\treturn  8\n\n# a.pyé\n" in text
    refused = sample.prepare("code", "--input", tree, "--names", "*.java", "--out", tmp_path / "no", check=False)
    assert refused.returncode == 2
    assert "*.java" in refused.stderr


def test_without_an_input_it_is_the_library_of_this_python() -> None:
    folders = source_files([library_folder()], NAMES)
    files = {file.name for files in folders.values() for file in files}
    assert {"argparse.py", "dataclasses.py"} <= files
    assert not any("site-packages" in name for name in folders)
