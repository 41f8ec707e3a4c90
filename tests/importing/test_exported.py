"""An imported model that is exported says and writes in transformers what its source does there, or in fairseq."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_ms import cli
from tests.helpers import trained
from tests.helpers.beside import library
from tests.helpers.cli import ROOT
from tests.importing.cases import LENGTHS, OF_TEXTS, PROMPT, VERSIONS, WRITTEN
from tests.importing.test_fairseq_models import CASES as OF_FAIRSEQ
from tests.importing.test_fairseq_models import loaded, write
from tests.importing.test_hf_models import symbols_of

# Beside those that write a text; windows that see all that there is change nothing.
OPEN = {"llama_text": "1x=0:*2,1x=0:64*2", "gpt2_text": "1x=0:64"}
PLAIN = ("llama_bf16", "llama_biases", "qwen3_types", "qwen3_grouped", "gpt2_inner")


@pytest.fixture(scope="module")
def exported(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NAME/imported and NAME/exported with what the source says, in NAME/expected.pt."""
    folder, source = tmp_path_factory.mktemp("exported"), made[VERSIONS[-1]]
    windows = [(f"{name}_windows", name, ["--scale-windows", given]) for name, given in OPEN.items()]
    for name, of, more in [*((name, name, []) for name in (*OF_TEXTS, *PLAIN)), *windows]:
        own, told = folder / name, torch.load(source / f"{of}.pt", weights_only=True)
        assert cli.main(["import", str(source / of), str(own / "imported"), *more]) == 0
        level = [] if of in OF_TEXTS else ["--level", "word"]
        assert cli.main(["export", str(own / "imported" / "checkpoint.pt"), str(own / "exported"), *level]) == 0
        symbols = symbols_of(source / of)
        cases = [
            {"tokens": symbols[told[n]["tokens"]], "log_probs": told[n]["logits"].log_softmax(-1)} for n in LENGTHS
        ]
        text = {"prompt": PROMPT, "written": WRITTEN, "text": told["text"]["text"]} if "text" in told else {}
        torch.save({"symbols": symbols, "cases": cases, **text}, own / "expected.pt")
    lines = trained.random_lines(1, 40)
    data = trained.write_corpus(folder / "bin", {"train": lines, "test": lines[:5]})
    for name in ("wiki103", "bos"):
        own = folder / name
        original = write(own / "model.pt", data, *OF_FAIRSEQ[name])
        assert cli.main(["import", str(original), str(own / "imported")]) == 0
        checkpoint = own / "imported" / "checkpoint.pt"
        assert cli.main(["export", str(checkpoint), str(own / "exported"), "--level", "word"]) == 0
        torch.save(said_by_fairseq(original, data), own / "expected.pt")
    return folder


@torch.no_grad()
def said_by_fairseq(original: Path, data: Path) -> dict[str, Any]:
    """Log-probabilities, and what it writes most probably after a line's beginning; without <s> and <pad>."""
    model, task = loaded(original, data)
    words, cases = task.source_dictionary, []
    for length in LENGTHS:
        tokens = torch.randint(4, len(words), (2, length), generator=torch.Generator().manual_seed(length))
        log_probs = model.get_normalized_probs(model(tokens), log_probs=True, sample=None)
        cases.append({"tokens": tokens, "log_probs": log_probs})
    prompt = "w3 w1 w4"
    begin = words.bos() if task.args.add_bos_token else words.eos()
    written = [begin, *(words.index(word) for word in prompt.split())]
    for _ in range(10):
        scores = model(torch.tensor([written]))
        last = model.get_normalized_probs(scores, log_probs=True, sample=None)[0, -1]
        last[[words.bos(), words.pad()]] = -torch.inf
        written.append(int(last.argmax()))
    symbols = " ".join("\n" if token == words.eos() else words[token] for token in written[1:])
    text = "\n".join(line.strip() for line in symbols.split("\n"))
    every = torch.arange(len(words))
    return {"symbols": every, "cases": cases, "prompt": prompt, "written": 10, "text": text}


NAMES = [*OF_TEXTS, *PLAIN, *(f"{name}_windows" for name in OPEN), "wiki103", "bos"]


@pytest.mark.parametrize("version", VERSIONS)
def test_transformers_says_and_writes_what_the_source_does(
    version: str,
    exported: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    paths = [str(library(version, tmp_path_factory.getbasetemp())), str(ROOT)]
    env = {"PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("checking.py")), str(exported), *NAMES]
    env = {**os.environ, **env, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["name"] for result in found] == NAMES
    for result in found:
        # float32 of sums in another order; log-probabilities reach -30.
        assert result["log_probs"] < 3e-5, result
        expected = torch.load(exported / result["name"] / "expected.pt", weights_only=True)
        assert result["text"] == expected.get("text"), result["name"]


@pytest.mark.parametrize("name", ["llama_text", "gpt2_text_windows"])
def test_the_commands_take_the_checkpoint_and_the_folder(
    name: str, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = exported / name, torch.load(exported / name / "expected.pt", weights_only=True)
    places = [str(folder / "imported" / "checkpoint.pt"), str(folder / "exported")]
    for place in places:
        drawn = ["--temperature", "0", "--max-len-b", str(WRITTEN), "--cpu"]
        capsys.readouterr()
        assert cli.main(["sample", place, "--prompt", PROMPT, *drawn]) == 0
        assert capsys.readouterr().out.removesuffix("\n") == expected["text"]
    text = "\n".join([PROMPT, "", "the cat sat — on the naïve mat\t", "  isn't it?"] * 9) + "\n"
    (tmp_path / "texts" / "test").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (tmp_path / "texts" / split).mkdir(exist_ok=True)
        (tmp_path / "texts" / split / "a.txt").write_text(text)
    given = ["--bpe", "hf_byte_bpe", "--vocab-from", str(folder / "imported"), "--workers", "1", "--quiet"]
    texts = ["--input", str(tmp_path / "texts"), "--out", str(tmp_path / "data")]
    assert cli.main(["prepare", "text", *texts, *given]) == 0
    found: list[dict[str, Any]] = []
    for place, data in zip(places, (tmp_path / "data" / "bin", tmp_path / "texts" / "test" / "a.txt"), strict=True):
        numbers = tmp_path / f"{len(found)}.json"
        assert cli.main(["perplexity", place, "--data", str(data), "--cpu", "--json", str(numbers)]) == 0
        found.append(json.loads(numbers.read_text()))
    for what in ("targets", "window", "stride", "bits_per_source_byte"):
        assert found[0][what] == pytest.approx(found[1][what], rel=1e-5), what
