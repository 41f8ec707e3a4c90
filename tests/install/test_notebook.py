"""The quickstart's notebook: well-formed and clean as it is committed, and its code makes what its text promises."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import ROOT, run_cli

NOTEBOOK = ROOT / "user_dir_examples" / "quickstart.ipynb"
FIGURES = ("training", "attention", "recall")


def notebook() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]


def as_script(constants: dict[str, int]) -> str:
    """The code of all cells, with other numbers for some constants of the first."""
    script = "\n\n".join("".join(cell["source"]) for cell in code_cells())
    for name, value in constants.items():
        script, count = re.subn(rf"^{name} = \d+", f"{name} = {value}", script, flags=re.MULTILINE)
        assert count == 1, name
    return script


def test_the_cells_are_plain_python_under_headings():
    ast.parse(as_script({}))  # a magic or a shell line is no Python
    assert "shell=" not in as_script({})
    text = ["".join(cell["source"]) for cell in notebook()["cells"] if cell["cell_type"] == "markdown"]
    assert text[0].startswith("# ")
    assert sum(part.startswith("## ") for part in text) >= 5
    for link in re.findall(r"\]\(([^)]+)\)", "\n".join(text)):
        assert (NOTEBOOK.parent / link).is_file(), link


def test_the_outputs_are_those_of_one_run_from_top_to_bottom_without_paths_of_its_machine():
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    printed = ["".join(output["text"]) for output in outputs if output["output_type"] == "stream"]
    assert all(output["name"] == "stdout" for output in outputs if output["output_type"] == "stream")
    assert not re.search(r"(^|[\s'\"=(])(/\w|~/|\w:\\)", "\n".join(printed))
    assert sum("image/png" in output.get("data", {}) for output in outputs) == len(FIGURES)
    assert NOTEBOOK.stat().st_size < 200_000


@pytest.mark.slow
def test_the_code_makes_samples_figures_and_the_table_of_recall(tmp_path: Path) -> None:
    script = tmp_path / "quickstart.py"
    script.write_text(as_script({"UPDATES": 10, "RECALL_UPDATES": 10}), encoding="utf-8")
    done = run_cli("python", script, cwd=tmp_path, env={"MPLBACKEND": "Agg"}, timeout=600.0)
    out = tmp_path / "quickstart"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quickstart", "quickstart.py"]
    samples = (out / "samples.txt").read_text(encoding="utf-8").splitlines()
    prompts = ("Return True if", "Raise an error if", "This function")
    # One line each, in their order; after ten updates, a line may end with its prompt.
    assert all(sample.startswith(prompt) for sample, prompt in zip(samples, prompts, strict=True))
    assert any(len(sample) > len(prompt) for sample, prompt in zip(samples, prompts))
    assert all(sample in done.stdout for sample in samples)
    for name in FIGURES:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    # What the two see by formula, which 10 updates do not change.
    assert re.search(r"^transformer_xl +16 +20 +18 ", done.stdout, re.MULTILINE)
    assert re.search(r"^transformer_ql +44 +48 +46 ", done.stdout, re.MULTILINE)
    assert "warning" not in done.stderr.lower()
