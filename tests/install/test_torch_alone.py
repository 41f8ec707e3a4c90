"""The core where nothing but torch is installed: no fairseq, no omegaconf."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.helpers.beside import library
from tests.helpers.cli import ROOT

# Every model trains, continues a text with a state, generates, and is the same from a file of safetensors.
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from safetensors.torch import load_model, save_model
import fairseq_ms
from fairseq_ms import core
assert not {"fairseq", "omegaconf", "hydra"} & set(sys.modules)
torch.manual_seed(0)
text = torch.arange(400) % 7
rows = text.unfold(0, 41, 40)
sizes = {"vocab_size": 7, "dim": 24, "ffn_dim": 32, "heads": 12, "max_positions": 64, "dropout": 0.0}
for name in [name[:-6] for name in core.__all__ if name.endswith("Config") and name != "ModelConfig"]:
    own = {"separators": (3,)} if name in ("HAED", "HRED") else sizes
    own = {**own, "vocab_size": 7}
    model = getattr(core, name)(getattr(core, name + "Config")(**own))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    # A bag of words says less than the next word.
    assert losses[-1] < (0.98 if name == "CoarseLM" else 0.9) * losses[0], (name, losses)
    model.eval()
    with torch.no_grad():
        whole, _ = model(rows[:2, :30])
        first, state = model(rows[:2, :13])
        second, state = model(rows[:2, 13:30], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=0.0, atol=1e-4)
    sample = model.generate(rows[:2, :5], 12, temperature=0.7, top_k=3)
    assert sample.shape == (2, 17) and sample[:, :5].equal(rows[:2, :5])
    save_model(model, sys.argv[2])
    other = getattr(core, name)(type(model.config).from_dict(model.config.to_dict())).eval()
    load_model(other, sys.argv[2])
    with torch.no_grad():
        torch.testing.assert_close(other(rows[:2, :30])[0], whole, rtol=0.0, atol=0.0)
    print(name, "passed")
"""


def with_its_needs(name: str) -> set[str]:
    """The names of a distribution and of all that it needs, extras left out."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        name = re.split(r"[\s;<>=!~\[(]", waiting.pop())[0].lower().replace("_", "-")
        if name not in found:
            found.add(name)
            needs = metadata.requires(name) or []
            waiting += [need for need in needs if "extra ==" not in need and "platform_" not in need]
    return found


@pytest.fixture
def torch_alone(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages: torch with what it needs, safetensors with numpy, and this project, installed."""
    folder = tmp_path / "packages"
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(folder), str(ROOT)], check=True, timeout=300)
    for name in with_its_needs("torch") | {"numpy"}:
        for file in metadata.files(name) or []:
            top = file.parts[0]
            source = Path(str(metadata.distribution(name).locate_file(top)))
            if top not in ("..", "bin", "__pycache__") and source.exists() and not (folder / top).exists():
                (folder / top).symlink_to(source)
    beside = library("transformers-5", tmp_path_factory.getbasetemp())
    (folder / "safetensors").symlink_to(beside / "safetensors")
    return folder


@pytest.mark.slow
def test_every_model_trains_generates_saves_and_loads_where_torch_is_all_there_is(torch_alone: Path, tmp_path: Path):
    assert not (torch_alone / "omegaconf").exists()
    # Without site-packages: what is imported lies in the folder or in Python itself.
    command = [sys.executable, "-S", "-c", PROGRAM, str(torch_alone), str(tmp_path / "model.safetensors")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == 10


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
