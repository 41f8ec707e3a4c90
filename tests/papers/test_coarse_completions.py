"""`fairseq-ms coarse-completions`: the most probable words of the next bag."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_ms.cli import main
from fairseq_ms.errors import UsageError
from fairseq_ms.papers.coarse_completions import complete, readable, scale_of
from fairseq_ms.tools.checkpoints import Checkpoint
from tests.references.multiscale import coarse_lm
from tests.references.parts import weights_of
from tests.registry import Case, random_case


def checkpoint_of(case: Case) -> Checkpoint:
    cfg = OmegaConf.create({"model": {"_name": case.arch}})
    task = SimpleNamespace(source_dictionary=case.dictionary, args=SimpleNamespace())
    return Checkpoint("here", "model.pt", case.model, task, cfg)


@pytest.mark.parametrize("seed", range(8))
def test_completions_are_the_best_words_after_the_last_k_gram(seed: int) -> None:
    case = random_case("coarse_lm", seed)
    checkpoint = checkpoint_of(case)
    words = [f"w{case.rng.randrange(9)}" for _ in range(case.rng.randint(1, 90))]
    found = complete(checkpoint, " ".join(words), top=5)
    scale = scale_of(checkpoint)
    assert (found["scale"], found["label"]) == (scale, "here")
    assert (found["read"] - 1) % scale == 0
    # The start symbol and the words, as far as there are positions for them.
    most = min(len(words), 64) if case.flags["positions"] == "learned" else len(words)
    assert most - scale < found["read"] <= most
    tokens = torch.tensor([case.dictionary.index(word) for word in words[-found["read"] :]])
    with torch.no_grad():
        logits = coarse_lm(weights_of(case.model), case.flags, tokens.tolist())[-1]
    probabilities = logits.softmax(-1).float()
    best = probabilities.argsort(descending=True)[:5]
    assert found["words"] == [case.dictionary[int(word)] for word in best]
    torch.testing.assert_close(torch.tensor(found["probabilities"]), probabilities[best], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (4, 1), (5, 5), (99, 61)])
def test_a_context_is_cut_at_its_beginning_to_whole_k_grams(tokens: int, expected: int) -> None:
    assert readable(tokens, 4, 64) == expected


def test_another_architecture_and_an_empty_context_get_one_sentence() -> None:
    vanilla = checkpoint_of(random_case("vanilla_lm", 0))
    with pytest.raises(UsageError, match="--arch coarse_lm"):
        scale_of(vanilla)
    with pytest.raises(UsageError, match="--text must have at least one word: got '  '"):
        complete(checkpoint_of(random_case("coarse_lm", 0)), "  ")


def test_the_command_prints_a_table_and_writes_json(models: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    command = ["coarse-completions", str(models / "coarse/model.pt"), "--cpu"]
    assert main([*command, "--text", "w1 w2 w3 w4 w5", "--text", "w4", "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "Context: w1 w2 w3 w4 w5\ncheckpoint  scale  completion\n" in printed
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["context"] for result in results] == ["w1 w2 w3 w4 w5", "w4"]
    (completion,) = results[0]["completions"]
    assert (completion["scale"], completion["read"], len(completion["words"])) == (4, 5, 4)
    assert "  ".join(completion["words"]) in printed
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2 w3\n\nw4\n"))
    assert main([*command, "--input", "-", "--top", "3"]) == 0
    assert capsys.readouterr().out.count("Context: ") == 2


@pytest.mark.parametrize("content", [None, "déjà\n".encode("latin-1"), b" \n\n"])
def test_contexts_that_are_not_text_get_one_sentence(content: bytes | None, tmp_path: Path, capsys) -> None:
    path = tmp_path / "contexts.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["coarse-completions", "model.pt", "--input", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
