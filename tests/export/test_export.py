"""What is exported is the model, in transformers and without fairseq."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fairseq_ms import cli
from fairseq_ms.errors import UsageError
from fairseq_ms.tools import tokenizing
from tests.export.cases import CASES, LEVELS
from tests.helpers import trained
from tests.helpers.beside import library
from tests.helpers.cli import ROOT

VERSIONS = ("transformers-4", "transformers-5")


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory):
    """Where each version of transformers lies; here, safetensors can be imported from one of them."""
    folders = {version: str(library(version, tmp_path_factory.getbasetemp())) for version in VERSIONS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, folders[VERSIONS[-1]]])
        yield folders


@pytest.fixture(scope="module")
def exported(beside, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of exported models, one of every case."""
    from tests.export.making import make

    folder = tmp_path_factory.mktemp("exported")
    with torch.device("cpu"):
        make(folder)
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_every_exported_model_and_tokenizer_is_the_one_that_fairseq_has(version, beside, exported: Path, tmp_path):
    env = {"PYTHONPATH": beside[version], "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "export" / "checking.py"), str(exported), *CASES, *LEVELS]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["name"] for result in found] == [*CASES, *LEVELS]
    for result in found[: len(CASES)]:
        assert result.pop("logits") <= 1e-6, result
        assert result.pop("padded logits") <= 1e-6, result
        assert result.pop("padded loss") <= 1e-6, result
        # Log-probabilities down to -30, of sums in another order.
        cached = ("cached logits", "logits of turns", "logits of turns by steps")
        assert max(map(result.pop, cached)) <= 5e-5, result
        if version == VERSIONS[-1]:
            # Of the largest, in float32.
            assert result.pop("adapted cached logits") <= 5e-6, result
    assert not [(result["name"], what) for result in found for what, holds in result.items() if not holds]


def test_the_folder_holds_what_the_hub_wants(exported: Path) -> None:
    folder = exported / "haed" / "haed"
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_fairseq_ms.HAEDForCausalLM"
    assert len(config["model"]["separators"]) == 2
    card = (folder / "README.md").read_text()
    assert "license: mit" in card
    grouped = exported / "window" / "window"
    assert "| `--kv-heads` | `1` |" in (grouped / "README.md").read_text()
    assert json.loads((grouped / "config.json").read_text())["model"]["kv_heads"] == 1
    keys = load_file(grouped / "model.safetensors")["decoder.layers.0.attention.fine.weight"]
    assert keys.shape == (16 + 2 * 8, 16)
    assert "Not measured." in card
    files = {file.name for file in folder.iterdir()}
    assert {name for name in files if not name.endswith(".py")} == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer_config.json", "vocab.json"),
    }
    assert {
        "modeling_fairseq_ms.py",
        "core_hierarchical_haed.py",
        "hf_causal_lm.py",
        "tokenization_fairseq_ms.py",
    } <= files
    of_bytes = exported / "byte_bpe" / "byte_bpe"
    assert (of_bytes / "tokenizer.json").is_file()
    assert not [*of_bytes.glob("tokenization*"), *of_bytes.glob("vocab*")]
    # What another pipeline needs stays behind.
    assert "core_steps_replay.py" in files
    assert not {"pipeline_moses.py", "pipeline_subwords.py"} & files
    origins = {(folder / name).read_text().split(" ", 2)[1] for name in files if name.endswith(".py")}
    own = ("Written", "fairseq_ms.core.", "fairseq_ms.export.hf.", "fairseq_ms_pipeline.")
    assert all(origin.startswith(own) for origin in origins), origins


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    lines = trained.random_lines(1, 10)
    data = trained.write_corpus(tmp_path / "data" / "bin", {"train": lines, "valid": lines[:2]})
    return trained.write_checkpoint(
        tmp_path / "model.pt", data, "vanilla_lm", *trained.TINY, "--tokens-per-sample", "8"
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "--level must be one of word, bpe, hf_byte_bpe, hf_tokenizer, char, byte where no manifest.json"),
        (["--level", "bpe"], "--bpe-codes must name the file of BPE operations"),
        (["--level", "word", "--bpe-codes", "codes"], "--bpe-codes has no effect with --level word"),
        (["--level", "word", "--language", "de"], "--language has no effect without --tokenise moses"),
        (["--level", "word", "--perplexity", "none.json"], "--perplexity must name files"),
        (["--level", "hf_byte_bpe", "--bpe-codes", "codes/old.txt"], "--bpe-codes must be a merges.txt"),
        (["--level", "hf_byte_bpe", "--bpe-codes", "alone/merges.txt"], "--bpe-codes must have its vocab.json"),
        (["--level", "hf_byte_bpe", "--bpe-codes", "codes/merges.txt"], "--bpe-codes must be those of the data"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(
    flags, sentence, checkpoint, tmp_path: Path, beside, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("codes/old.txt", "codes/merges.txt", "alone/merges.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("#version: 0.2\n")
    Path("codes/vocab.json").write_text('{"a": 0}')
    assert cli.main(["export", str(checkpoint), str(tmp_path / "out"), *flags]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_fails_leaves_no_folder_behind(checkpoint: Path, tmp_path: Path, beside) -> None:
    command = ["export", str(checkpoint), str(tmp_path / "new" / "below" / "out"), "--level", "word"]
    assert cli.main([*command, "--perplexity", "none.json"]) == 2
    assert not (tmp_path / "new").exists()
    assert cli.main(command) == 0
    assert (tmp_path / "new" / "below" / "out" / "config.json").is_file()


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"settings": 3}', "[" * 100_000])
def test_a_damaged_manifest_is_one_sentence(text: str, tmp_path: Path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UsageError, match=r"--data must be as fairseq-ms prepare wrote it: .*manifest\.json is damaged"):
        tokenizing.pipeline_of(tmp_path, None, None, None, None)


def test_without_safetensors_the_sentence_says_what_to_install(checkpoint: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert cli.main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "pip install safetensors" in capsys.readouterr().err
