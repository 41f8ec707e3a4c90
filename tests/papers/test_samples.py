"""sample-metrics, against loops and models of known answers."""

import json
import math
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.models import FairseqLanguageModel
from omegaconf import OmegaConf

from fairseq_ms.cli import main
from fairseq_ms.errors import UsageError
from fairseq_ms.papers import _judges as judges
from fairseq_ms.papers import sample_metrics as samples
from fairseq_ms.tools import checkpoints
from tests.helpers.asked import STREAMING
from tests.helpers.trained import TINY, load, make_unigram, write_checkpoint
from tests.papers.test_sample_judges import ARPA, needs_kenlm


@pytest.mark.parametrize("package", ["kenlm", "transformers", "sacrebleu"])
def test_a_missing_package_is_named_with_what_to_run(models, package, monkeypatch, tmp_path, capsys):
    (tmp_path / "x.arpa").write_text(ARPA)
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == package else real(name, *rest))
    flags = {"kenlm": ["--ngram-lm", str(tmp_path / "x.arpa")], "transformers": ["--hf-lm", str(tmp_path)]}
    command = ["sample-metrics", str(models / "vanilla/model.pt"), "--prefix-size", "9", "--length", "7"]
    assert main([*command, *flags.get(package, [])]) == 2
    assert f"needs the package {package}: run pip install {package}" in capsys.readouterr().err


def test_repeated_fraction_counts_ngrams_seen_before():
    assert samples.repeated_fraction(["a"], 2) == 0.0
    tokens = torch.randint(0, 6, (256,)).tolist()
    for order in (1, 2, 3, 4):
        grams = [tokens[start : start + order] for start in range(256 - order + 1)]
        seen_before = sum(gram in grams[:position] for position, gram in enumerate(grams))
        assert samples.repeated_fraction(tokens, order) == pytest.approx(seen_before / len(grams))


def test_reference_bleu_is_100_for_a_truth_among_the_completions_and_0_for_strangers():
    truth = "a b c d e f g"
    assert samples.reference_bleu([truth], [["x y", truth, "z"]]) == pytest.approx(100.0)
    assert samples.reference_bleu([truth], [["x y z u v w q"] * 3]) < 5.0


def test_sampling_draws_each_token_from_the_k_most_probable_at_the_temperature(models):
    probabilities = torch.zeros(28)
    probabilities[[2, 5, 6, 7]] = torch.tensor([0.4, 0.3, 0.2, 0.1])

    def four_words(model: FairseqLanguageModel) -> None:
        make_unigram(model, probabilities[: model.decoder.core.project.weight.size(0)].clamp(min=1e-9).log())

    path = write_checkpoint(
        models / "four/model.pt", models / "bin", "vanilla_lm", *TINY, "--tokens-per-sample", "64", change=four_words
    )
    draw = partial(
        samples.sample, checkpoints.load(str(path)), length=20, topk=3, temperature=0.5, completions=4, seed=2
    )
    drawn = draw(torch.randint(4, 20, (30, 5)))
    # Squared by the temperature, the fourth left out: 16 : 9 : 4. Symbol 2, the end of a sentence, is one of them.
    counts = drawn.flatten().bincount(minlength=8)[[2, 5, 6]]
    assert drawn.shape == (30, 4, 20)
    assert counts.sum() == drawn.numel()
    # One standard deviation of the greatest share over 2,400 draws is 0.01.
    torch.testing.assert_close(counts / drawn.numel(), torch.tensor([16.0, 9.0, 4.0]) / 29, atol=0.03, rtol=0)
    assert torch.equal(drawn, draw(torch.randint(4, 20, (30, 5))))


@pytest.mark.parametrize("name", ["topdown", "haed", *STREAMING])
def test_greedy_samples_equal_the_argmax_of_whole_forward_passes(models, name):
    checkpoint = load(models, name)
    (tokens,) = checkpoint.documents("test", limit=40)
    prompts, _ = samples.cut_prompts(tokens, 7, 11, 2)
    drawn = samples.sample(checkpoint, prompts, 11, 1, 0.7, completions=1, seed=1)
    for prompt, (sample,) in zip(prompts, drawn):
        sequence = [checkpoint.dictionary.eos(), *prompt.tolist()]
        for token in sample.tolist():
            logits = checkpoint.model(torch.tensor([sequence]))[0][0, -1]
            logits[[checkpoint.dictionary.bos(), checkpoint.dictionary.pad()]] = -math.inf
            assert token == int(logits.argmax())
            sequence.append(token)


def test_prompts_are_followed_by_the_truth_and_do_not_overlap():
    prompts, truths = samples.cut_prompts(torch.arange(100), 7, 13, 3)
    assert prompts[:, 0].tolist() == [0, 40, 80]
    assert torch.equal(torch.cat([prompts, truths], 1), prompts[:, :1] + torch.arange(20))
    with pytest.raises(UsageError, match="--length must leave room"):
        samples.cut_prompts(torch.arange(19), 7, 13, 3)


def test_pieces_of_words_are_joined_across_the_samples_words(models):
    dictionary = {1: "un@@", 2: "heard", 3: "of", 4: "</s>", 5: "cut@@"}
    task = SimpleNamespace(source_dictionary=dictionary)
    checkpoint = checkpoints.Checkpoint("here", "model.pt", None, task, OmegaConf.create())
    assert samples.words_of(checkpoint, torch.tensor([1, 2, 3, 4, 5]), "@@ ") == ["unheard", "of", "</s>", "cut"]
    assert samples.words_of(checkpoint, torch.tensor([1, 2, 3]), None) == ["un@@", "heard", "of"]


def test_sample_metrics_prints_every_column_for_every_checkpoint(models, tmp_path, capsys):
    needs_kenlm()
    (tmp_path / "tiny.arpa").write_text(re.sub(r"\b[abc]\b", lambda m: f"w{'abc'.index(m[0])}", ARPA))
    paths = [str(models / "vanilla/model.pt"), f"other={models / 'retina/model.pt'}"]
    sizes = ["--prompts", "3", "--prefix-size", "5", "--length", "9", "--completions", "2", "--timed", "1"]
    files = ["--ngram-lm", str(tmp_path / "tiny.arpa"), "--json", str(tmp_path / "out.json")]
    assert main(["sample-metrics", *paths, *sizes, *files]) == 0
    vanilla, other = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [vanilla["label"], other["label"]] == ["vanilla", "other"]
    for result in (vanilla, other):
        assert len(result["samples"]) == 3
        assert all(len(sample["completions"]) == 2 for sample in result["samples"])
        words = [text.split() for sample in result["samples"] for text in sample["completions"]]
        assert {len(one) for one in words} == {9}
        assert result["repeat-1"] == pytest.approx(np.mean([1 - len(set(one)) / 9 for one in words]))
        contexts = [sample["context"].split() for sample in result["samples"] for _ in range(2)]
        model = judges.NGramModel(str(tmp_path / "tiny.arpa"))
        assert result["n-gram PPL"] == pytest.approx(model.perplexity(contexts, words))
        assert result["s/seq"] > 0
    assert "n-gram PPL  Ref-BLEU  repeat-1" in capsys.readouterr().out
