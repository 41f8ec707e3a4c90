"""Source code: whole folders in one split, equal files once, nothing of a line lost."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from fairseq_ms_pipeline.datasets.code import NAMES, code, placed_files, sources_of
from fairseq_ms_pipeline.stdlib_docs import library_folder, split_by_size
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
    lines = list(code(placed_files(sources_of(tree, NAMES), 1, 0.1), lambda count: None))
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


def project(folder: Path, files: dict[str, int]) -> Path:
    """A folder of files of so many lines, of which no two are equal."""
    for name, count in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text("".join(f"{name} = {line}\n" for line in range(count)))
    return folder


def test_linked_folders_and_names_that_are_not_utf_8_are_sources_too(tmp_path: Path) -> None:
    odd = os.fsdecode(b"\xff\xfe")
    project(tmp_path / "elsewhere", {"a": 3})
    tree = project(tmp_path / odd / odd, {"b": 2, "c": 2, "d": 2}).parent
    (tree / "linked").symlink_to(tmp_path / "elsewhere")
    sample.prepare("code", "--input", tree, "--bpe-merges", "20", "--out", tmp_path / "out")
    texts = [(tmp_path / "out" / "text" / f"{split}.txt").read_text() for split in ("train", "valid", "test")]
    assert sum(text.count("a = ") for text in texts) == 3


CHANGES = {
    "added": (lambda tree: project(tree, {"f40/a": 1}), ()),
    "removed": (lambda tree: (tree / "f01" / "b.py").unlink(), ()),
    "rewritten": (lambda tree: (tree / "f00" / "a.py").write_text("f00/a = 9\n"), ()),
    "moved": (lambda tree: (tree / "f01").rename(tree / "g01"), ()),
    "other names": (lambda tree: None, ("--names", "*.p?")),
}


@pytest.fixture(scope="module", params=["finished", "interrupted"])
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Sources, and the folder of a run over them that ended or was cut off after reading them."""
    folder = tmp_path_factory.mktemp(request.param)
    tree = project(folder / "tree", {f"f{number:02}/{name}": 1 + number for number in range(40) for name in "ab"})

    def cut_off(*args: object) -> int:
        raise ValueError("cut off")

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "interrupted":
            patch.setattr("fairseq_ms_pipeline.run.tokenise_shard", cut_off)
        flags = ("--input", tree, "--bpe-merges", "20", "--out", folder / "out")
        sample.prepare("code", *flags, check=request.param == "finished")
    return tree, folder / "out"


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_over_other_sources_is_refused(begun: tuple[Path, Path], tmp_path: Path, change: str) -> None:
    alter, flags = CHANGES[change]
    tree = shutil.copytree(begun[0], tmp_path / "tree")
    alter(tree)
    before = sample.tree(begun[1])
    command = ("--input", tree, "--bpe-merges", "20", *flags)
    refused = sample.prepare("code", *command, "--out", begun[1], check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "of a run with other settings" in refused.stderr
    assert sample.tree(begun[1]) == before


def test_a_run_over_equal_sources_elsewhere_goes_on(begun: tuple[Path, Path], tmp_path: Path) -> None:
    tree = shutil.copytree(begun[0], tmp_path / "tree")
    out = shutil.copytree(begun[1], tmp_path / "out")
    sample.prepare("code", "--input", tree, "--bpe-merges", "20", "--out", out)
    assert (out / "manifest.json").is_file()


def test_without_an_input_it_is_the_library_of_this_python_split_by_folder() -> None:
    sources = sources_of(library_folder(), NAMES)
    assert {"argparse.py", "dataclasses.py"} <= {source.path.name for source in sources}
    assert not any("site-packages" in source.folder for source in sources)
    sizes: dict[str, int] = {}
    for source in sources:
        sizes[source.folder] = sizes.get(source.folder, 0) + source.path.stat().st_size
    splits = split_by_size(sizes, 1, 0.05)
    placed = placed_files(sources, 1, 0.05)
    assert all(document == source.folder and split == splits[document] for document, split, source in placed)
    folders = Counter(splits[document] for document in {document for document, _, _ in placed})
    assert folders.keys() == {"train", "valid", "test"}
    # The library that the recorded experiments read, whose counts its README has.
    if sum(source.size for source in sources if source.path.suffix == ".py") == 31_525_224:
        assert folders == {"train": 49, "valid": 51, "test": 12}


def test_what_a_seed_draws_for_folders_stays_as_it_is() -> None:
    """Corpora that were prepared before are to be made again as they were."""
    splits = split_by_size({f"f{number}": 100 + number for number in range(60)}, 1, 0.05)
    held_out = {split: [name for name in splits if splits[name] == split] for split in ("valid", "test")}
    assert held_out == {"valid": ["f30", "f41", "f5"], "test": ["f38", "f43", "f18"]}


PROJECTS = {
    "three folders": {"src/a": 900, "src/b": 800, "tests/a": 700, "docs/conf": 90},
    "one flat folder": {f"m{number}": 300 + number for number in range(8)},
    "three files, two of them small": {"a": 1, "b": 2, "c": 900},
    "a file of little": {"p/__init__": 1, **{f"p/m{number}": 300 + number for number in range(8)}},
    "a large folder": {"big/a": 900, "big/b": 900, "big/c": 70, **{f"f{number}/a": 2 for number in range(9)}},
    "a folder to hold out without text": {"src/a": 900, "src/b": 900, "src/c": 900, "e/__init__": 0, "f/__init__": 0},
}


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_of_few_folders_is_split_by_file(tmp_path: Path, name: str) -> None:
    tree = project(tmp_path / "proj", PROJECTS[name])
    sample.prepare("code", "--input", tree, "--bpe-merges", "20", "--out", tmp_path / "out")
    texts = {split: (tmp_path / "out" / "text" / f"{split}.txt").read_text() for split in ("train", "valid", "test")}
    assert all(texts.values())
    assert len(texts["train"]) == max(map(len, texts.values()))
    assert name != "a file of little" or min(map(len, texts.values())) > 0.02 * len(texts["train"])
    files = [file.read_text() for file in tree.rglob("*.py")]
    assert all(sum(text in held for held in texts.values()) == 1 for text in files if text)
    assert sum(map(len, texts.values())) == sum(map(len, files))


def test_inputs_of_the_same_names_are_split_by_file_too(tmp_path: Path) -> None:
    trees = [project(tmp_path / number / "src", {"a": 30 * int(number)}) for number in ("1", "2", "3")]
    sample.prepare("code", "--input", *trees, "--bpe-merges", "20", "--out", tmp_path / "out")
