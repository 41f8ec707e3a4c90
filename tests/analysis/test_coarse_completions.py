"""`fairseq-ms coarse-completions`: the most probable words of the next bag."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_ms.analysis.checkpoints import Checkpoint
from fairseq_ms.analysis.coarse_completions.command import read_lines
from fairseq_ms.analysis.coarse_completions.completions import complete, encode, readable, scale_of
from fairseq_ms.errors import UsageError
from tests.helpers.cli import run_cli
from tests.helpers.corpus import train_command, write_corpus
from tests.references.multiscale import coarse_lm
from tests.references.parts import weights_of
from tests.registry import Case, random_case


def checkpoint_of(case: Case) -> Checkpoint:
    cfg = OmegaConf.create({"model": {"_name": case.arch}})
    return Checkpoint("here", "model.pt", case.model, SimpleNamespace(source_dictionary=case.dictionary), cfg)


@pytest.mark.parametrize("seed", range(8))
def test_completions_are_the_best_words_after_the_last_k_gram(seed: int) -> None:
    case = random_case("coarse_lm", seed)
    checkpoint = checkpoint_of(case)
    words = [f"w{case.rng.randrange(9)}" for _ in range(case.rng.randint(1, 90))]
    found = complete(checkpoint, encode(checkpoint, " ".join(words)), top=5)
    scale = scale_of(checkpoint)
    assert (found.scale, found.label) == (scale, "here")
    assert (found.read - 1) % scale == 0
    # The start symbol and the words, as far as there are positions for them.
    most = min(len(words), 64) if case.flags["positions"] == "learned" else len(words)
    assert most - scale < found.read <= most
    tokens = torch.tensor([case.dictionary.index(word) for word in words[-found.read :]])
    with torch.no_grad():
        logits = coarse_lm(weights_of(case.model), case.flags, tokens.tolist())[-1]
    probabilities = logits.softmax(-1).float()
    best = probabilities.argsort(descending=True)[:5]
    assert found.words == [case.dictionary[int(word)] for word in best]
    torch.testing.assert_close(torch.tensor(found.probabilities), probabilities[best], rtol=1e-4, atol=1e-6)


def test_without_top_there_are_as_many_words_as_the_scale_has_tokens() -> None:
    for seed in range(6):
        case = random_case("coarse_lm", seed)
        checkpoint = checkpoint_of(case)
        assert len(complete(checkpoint, encode(checkpoint, "w1 w2 w3")).words) == scale_of(checkpoint)


@pytest.mark.parametrize(
    ("tokens", "scale", "positions", "expected"), [(1, 4, 64, 1), (4, 4, 64, 1), (5, 4, 64, 5), (99, 4, 64, 61)]
)
def test_a_context_is_cut_at_its_beginning_to_whole_k_grams(
    tokens: int, scale: int, positions: int, expected: int
) -> None:
    assert readable(tokens, scale, positions) == expected


def test_another_architecture_and_an_empty_context_get_one_sentence() -> None:
    vanilla = checkpoint_of(random_case("vanilla_lm", 0))
    with pytest.raises(UsageError, match=r"must hold a model of --arch coarse_lm: model\.pt holds vanilla_lm"):
        scale_of(vanilla)
    with pytest.raises(UsageError, match="--text must have at least one word: got '  '"):
        encode(vanilla, "  ")


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    data = write_corpus(tmp_path)
    run_cli(*train_command("coarse_lm", data, tmp_path / "small", "--scale-layers", "2x=1"))
    checkpoint = tmp_path / "small" / "checkpoint_last.pt"
    command = ("fairseq-ms", "coarse-completions", checkpoint, "--cpu")
    done = run_cli(*command, "--text", "word1 word2 word3", "--text", "word4", "--json", tmp_path / "out.json")
    assert "Context: word1 word2 word3\ncheckpoint  scale  completion\n" in done.stdout
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["context"] for result in results] == ["word1 word2 word3", "word4"]
    (completion,) = results[0]["completions"]
    assert (completion["scale"], completion["read"], len(completion["words"])) == (2, 3, 2)
    assert "  ".join(completion["words"]) in done.stdout
    piped = run_cli(*command, "--input", "-", "--top", "3", input="word1 word2 word3\n\nword4\n")
    assert piped.stdout.count("Context: ") == 2
    failed = run_cli(*command, "--input", tmp_path / "missing.txt", check=False)
    assert failed.returncode == 2
    assert failed.stderr.strip().endswith(f"--input must be a file: {tmp_path}/missing.txt does not exist")


def test_contexts_that_are_not_text_get_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("déjà\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"--input must be text in UTF-8: got .*latin1\.txt"):
        read_lines(str(tmp_path / "latin1.txt"))
