"""neighbors and sample-metrics, against brute force, independent scorers and models of known answers."""

import itertools
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.models import FairseqLanguageModel
from omegaconf import OmegaConf
from torch.nn import functional as F

from fairseq_ms.analysis import checkpoints
from fairseq_ms.analysis.neighbors import search
from fairseq_ms.analysis.sample_metrics import ngram_lm, pretrained_lm, samples
from fairseq_ms.cli import main
from fairseq_ms.errors import UsageError
from tests.helpers.trained import NARROW, TINY, make_unigram, random_lines, write_checkpoint, write_corpus

ARPA = """\\data\\
ngram 1=6
ngram 2=6
ngram 3=3

\\1-grams:
-1.3010\t<unk>\t0
-99\t<s>\t-0.4150
-0.8239\t</s>\t0
-0.6021\ta\t-0.3010
-0.4559\tb\t-0.2218
-0.9208\tc\t-0.1761

\\2-grams:
-0.3979\t<s> a\t-0.1249
-0.5229\ta b\t-0.0969
-0.2218\tb c\t-0.3010
-0.6990\tb a\t-0.0458
-0.3010\tc </s>
-0.8861\tb </s>

\\3-grams:
-0.1549\t<s> a b
-0.0969\ta b c
-0.2676\tb a b

\\end\\
"""


def scales(model: str) -> list[str]:
    return {
        "retina": ["retina_lm", *TINY, "--scale-windows", "1x=0:4,4x=4:32"],
        "vanilla": ["vanilla_lm", *TINY],
        "topdown": ["multiscale_topdown", *NARROW, "--scale-layers", "16x=1,4x=1,1x=1"],
        "bottomup": ["multiscale_bottomup", *NARROW, "--scale-layers", "16x=1,4x=1,1x=1"],
        "coarse": ["coarse_lm", *NARROW, "--scale-layers", "4x=1"],
    }[model]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    train = random_lines(1, 40)
    # Lines have 17 words and an end: segments of 18 tokens are lines. Line 31 is line 5 again.
    train[31] = train[5]
    data = write_corpus(folder / "bin", {"train": train, "test": random_lines(2, 31)})
    for name in ("retina", "vanilla", "topdown", "bottomup", "coarse"):
        write_checkpoint(folder / name / "model.pt", data, *scales(name), "--tokens-per-sample", "64")
    write_checkpoint(folder / "haed/model.pt", data, "haed", "--tokens-per-sample", "64")
    return folder


def load(place: Path, name: str) -> checkpoints.Checkpoint:
    return checkpoints.load(str(place / name / "model.pt"))


@pytest.mark.parametrize(
    ("name", "scales"),
    [("vanilla", [1]), ("retina", [1, 4]), ("topdown", [1, 4, 16]), ("bottomup", [1, 4, 16]), ("coarse", [4])],
)
def test_identical_segments_are_nearest_neighbours_at_every_scale(place, name, scales):
    checkpoint = load(place, name)
    assert search.scales_of(checkpoint) == scales
    segments = search.cut_segments(torch.cat(checkpoints.documents(checkpoint, "train")), 18)
    vectors = search.embed(checkpoint, segments, scales, max_tokens=100)
    for scale in scales:
        assert len(vectors[scale]) == 40
        (first, *_) = search.nearest(vectors[scale], vectors[scale][5], 3, exclude=5)
        assert first.segment == 31
        assert first.cosine == pytest.approx(1.0, abs=1e-5)


def test_representations_see_only_their_own_segment_and_are_means_over_it(place):
    checkpoint = load(place, "topdown")
    segments = search.cut_segments(torch.cat(checkpoints.documents(checkpoint, "train")), 18)
    alone = checkpoint.model.decoder.representations(segments[7:8])
    together = search.embed(checkpoint, segments, [4, 16], max_tokens=200)
    for scale in (4, 16):
        assert alone[scale].shape == (1, math.ceil(18 / scale), 16)
        np.testing.assert_allclose(together[scale][7], alone[scale][0].mean(0).detach().numpy(), atol=1e-5)


def test_the_scales_of_the_retina_are_what_the_heads_of_its_last_layer_look_at(place):
    model = load(place, "retina").model
    last = model.decoder.stack.layers[-1].attention
    segments = torch.randint(4, 20, (3, 18))
    seen = []
    hook = last.coarse[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(segments)
    hook.remove()
    found = model.decoder.representations(segments)
    assert found[4].shape == (3, 4, 2 * last.groups[1].heads * last.head_dim)
    assert found[1].shape == (3, 18, 2 * last.groups[0].heads * last.head_dim)
    torch.testing.assert_close(found[4], seen[0])


def brute_force(corpus: np.ndarray, query: np.ndarray, count: int) -> list[int]:
    cosines = [float(row @ query / np.linalg.norm(row) / np.linalg.norm(query)) for row in corpus]
    return sorted(range(len(corpus)), key=lambda row: -cosines[row])[:count]


def test_search_finds_what_comparing_with_every_row_finds():
    generator = np.random.default_rng(8)
    corpus, queries = generator.normal(size=(70, 9)), generator.normal(size=(6, 9))
    cosines, rows = search.search(corpus, queries, 11)
    for query, found, similar in zip(queries, rows, cosines):
        assert found.tolist() == brute_force(corpus, query, 11)
        assert similar[0] == pytest.approx(
            float(corpus[found[0]] @ query / np.linalg.norm(corpus[found[0]]) / np.linalg.norm(query))
        )


def test_search_by_faiss_finds_the_same(monkeypatch):
    class Index:
        """What the search uses of faiss.IndexFlatIP: inner products with every row, greatest first."""

        def __init__(self, dim: int) -> None:
            self.rows = np.empty((0, dim), np.float32)

        def add(self, rows: np.ndarray) -> None:
            self.rows = np.concatenate([self.rows, rows])

        def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
            products = queries @ self.rows.T
            order = np.argsort(-products, axis=1)[:, :count]
            return np.take_along_axis(products, order, 1), order

    generator = np.random.default_rng(9)
    corpus, queries = generator.normal(size=(40, 5)), generator.normal(size=(3, 5))
    expected = search.search(corpus, queries, 7)
    monkeypatch.setitem(sys.modules, "faiss", SimpleNamespace(IndexFlatIP=Index))
    cosines, rows = search._search_by_faiss(corpus, queries, 7)
    assert rows.tolist() == expected[1].tolist()
    np.testing.assert_allclose(cosines, expected[0], atol=1e-6)


def test_neighbors_answers_queries_by_position_and_by_text(place, tmp_path, capsys):
    text = " ".join(random_lines(1, 40)[5].split())
    command = ["neighbors", str(place / "retina/model.pt"), "--segment", "18", "--count", "2", "--scales", "4"]
    output = ["--position", "95", "--text", f"{text} unheard", "--json", str(tmp_path / "out.json")]
    assert main([*command, *output]) == 0
    by_position, by_text = json.loads((tmp_path / "out.json").read_text())["results"]
    assert by_position["segment"] == 5
    assert by_position["neighbors"]["4x"][0]["segment"] == 31
    assert by_position["query"] == text
    assert {found["segment"] for found in by_text["neighbors"]["4x"]} == {5, 31}
    printed = capsys.readouterr().out
    assert "1 of the 18 tokens of --text are unknown to retina" in printed
    assert "nearest at 4x" in printed


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["haed/model.pt"], "haed is a haed, whose states belong to streams or chunks"),
        (["retina/model.pt", "--scales", "8"], "--scales must be among those of retina, 1x, 4x: got 8x"),
        (["retina/model.pt", "--segment", "3"], "--segment must hold a block of 4 tokens: got 3"),
        (["retina/model.pt", "--segment", "65"], "--segment must be at most the 64 positions of retina: got 65"),
        (["retina/model.pt", "--segment", "18", "--position", "900"], "--position must lie in the 40 segments"),
        (["retina/model.pt", "--text", ""], "--text must have between 1 and 64 tokens: got 0"),
    ],
)
def test_neighbors_refuses_in_one_sentence(place, command, sentence, capsys):
    assert main(["neighbors", str(place / command[0]), *command[1:]]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1


def arpa_tables() -> list[dict[tuple[str, ...], tuple[float, float]]]:
    tables: list[dict[tuple[str, ...], tuple[float, float]]] = [{}, {}, {}, {}]
    for line in ARPA.splitlines():
        parts = line.split("\t")
        if len(parts) >= 2:
            words = tuple(parts[1].split())
            tables[len(words)][words] = (float(parts[0]), float(parts[2]) if len(parts) > 2 else 0.0)
    return tables


def back_off(tables: list, history: tuple[str, ...], word: str) -> float:
    """log10 p(word | history) from the definition of the ARPA format."""
    if (word,) not in tables[1]:
        word = "<unk>"
    history = tuple(one if (one,) in tables[1] else "<unk>" for one in history)[-2:]
    if (*history, word) in tables[len(history) + 1]:
        return tables[len(history) + 1][(*history, word)][0]
    if not history:
        return tables[1][(word,)][0]
    weight = tables[len(history)].get(history, (0.0, 0.0))[1]
    return weight + back_off(tables, history[1:], word)


def needs_kenlm() -> None:
    pytest.importorskip("kenlm", reason="needs kenlm: pip install kenlm")


def test_kenlm_scores_equal_an_independent_back_off_scorer(tmp_path):
    needs_kenlm()
    (tmp_path / "tiny.arpa").write_text(ARPA)
    model = ngram_lm.NGramModel(str(tmp_path / "tiny.arpa"))
    assert model.order == 3
    tables = arpa_tables()
    for words in itertools.product(["a", "b", "c", "zzz", "</s>"], repeat=4):
        for split in range(4):
            history: tuple[str, ...] = ("<s>",)
            expected = []
            for word in words:
                expected.append(back_off(tables, history, word) * math.log(10))
                history = ("<s>",) if word == "</s>" else (*history, word)
            found = model.score(words[:split], words[split:])
            assert found == pytest.approx(expected[split:], abs=1e-4)


def test_ngram_perplexity_is_over_all_words_of_all_samples(tmp_path):
    needs_kenlm()
    (tmp_path / "tiny.arpa").write_text(ARPA)
    model = ngram_lm.NGramModel(str(tmp_path / "tiny.arpa"))
    contexts, texts = [["a"], []], [["b", "c"], ["a"]]
    log10 = [-0.1549, -0.0969, -0.3979]
    assert ngram_lm.perplexity(model, contexts, texts) == pytest.approx(10 ** (-sum(log10) / 3), rel=1e-4)


def test_what_is_no_ngram_model_is_refused_in_one_sentence(tmp_path, monkeypatch):
    needs_kenlm()
    with pytest.raises(UsageError, match="--ngram-lm must be an ARPA or binary file: nowhere does not exist"):
        ngram_lm.NGramModel("nowhere")
    (tmp_path / "bad.arpa").write_text("\\data\\\nno\n")
    with pytest.raises(UsageError, match=r"--ngram-lm must be an ARPA or binary file: .*bad.arpa is not"):
        ngram_lm.NGramModel(str(tmp_path / "bad.arpa"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UsageError, match="needs kenlm's program lmplz on the PATH"):
        ngram_lm.estimate(["a b"], 4, str(tmp_path))


@pytest.mark.parametrize("package", ["kenlm", "transformers", "sacrebleu"])
def test_a_missing_package_is_named_with_what_to_run(place, package, monkeypatch, tmp_path, capsys):
    (tmp_path / "x.arpa").write_text(ARPA)
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == package else real(name, *rest))
    flags = {"kenlm": ["--ngram-lm", str(tmp_path / "x.arpa")], "transformers": ["--hf-lm", str(tmp_path)]}
    command = ["sample-metrics", str(place / "vanilla/model.pt"), "--context", "9", "--length", "7"]
    assert main([*command, *flags.get(package, [])]) == 2
    assert f"needs the package {package}: run pip install {package}" in capsys.readouterr().err


def test_lmplz_is_given_the_text_and_its_failure_is_told(tmp_path, monkeypatch):
    # A program in lmplz's place that writes what it was given, or fails.
    program = tmp_path / "bin/lmplz"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n[ \"$2\" = 4 ] || { echo 'wrong order' >&2; exit 3; }\ncat\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    path = ngram_lm.estimate(["a b", "c"], 4, str(tmp_path))
    assert Path(path).read_text() == "a b\nc\n"
    with pytest.raises(UsageError, match="lmplz ended with 3 \\(wrong order\\)"):
        ngram_lm.estimate(["a b"], 2, str(tmp_path))


class TwoTokens(torch.nn.Module):
    """A causal model in Hugging Face's sense: token t + 1 is t + 1 mod 5 with the logit 2, others 0."""

    device = torch.device("cpu")

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=2.0 * F.one_hot((ids + 1) % 5, 5).float())


def test_pretrained_perplexity_scores_every_token_after_its_context():
    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    hit, miss = -math.log(math.e**2 / (math.e**2 + 4)), -math.log(1 / (math.e**2 + 4))
    found = pretrained_lm.perplexity(TwoTokens(), tokenizer, ["0 1", "3"], ["2 3 3", "4"])
    assert found == pytest.approx(math.exp((3 * hit + miss) / 4))


def test_pretrained_perplexity_fits_contexts_into_the_positions_of_the_model():
    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    model = TwoTokens()
    vars(model)["config"] = SimpleNamespace(max_position_embeddings=4)
    hit = math.log((math.e**2 + 4) / math.e**2)
    assert pretrained_lm.perplexity(model, tokenizer, ["3 3 3 0 1"], ["2 3"]) == pytest.approx(math.exp(hit))
    assert pretrained_lm.perplexity(model, tokenizer, [""], ["2 3"]) == pytest.approx(math.exp(hit))
    with pytest.raises(UsageError, match="--length must fit into the 4 positions of --hf-lm: got 4 tokens"):
        pretrained_lm.perplexity(model, tokenizer, [""], ["1 2 3 4"])


@pytest.mark.parametrize(
    ("tokens", "order", "expected"),
    [
        ("a b a b a", 1, 3 / 5),
        ("a b a b a", 2, 2 / 4),
        ("a b a b a", 3, 1 / 3),
        ("a b c", 1, 0.0),
        ("a", 2, 0.0),
    ],
)
def test_repeated_fraction_counts_ngrams_seen_before(tokens, order, expected):
    assert samples.repeated_fraction(tokens.split(), order) == pytest.approx(expected)


def test_repeated_fraction_equals_a_loop_that_looks_back():
    tokens = torch.randint(0, 6, (256,)).tolist()
    for order in (1, 2, 3, 4):
        grams = [tokens[start : start + order] for start in range(256 - order + 1)]
        seen_before = sum(gram in grams[:number] for number, gram in enumerate(grams))
        assert samples.repeated_fraction(tokens, order) == pytest.approx(seen_before / len(grams))


def test_reference_bleu_is_100_for_a_truth_among_the_completions_and_0_for_strangers():
    truth = "a b c d e f g"
    assert samples.reference_bleu([truth], [["x y", truth, "z"]]) == pytest.approx(100.0)
    assert samples.reference_bleu([truth], [["x y z u v w q"] * 3]) < 5.0


def test_samples_of_a_model_that_always_says_one_word_are_that_word(place):
    def constant(model: FairseqLanguageModel) -> None:
        log_probs = torch.full((model.decoder.project.weight.size(0),), -30.0)
        log_probs[9] = 0.0
        make_unigram(model, log_probs)

    path = write_checkpoint(
        place / "constant/model.pt", place / "bin", *scales("vanilla"), "--tokens-per-sample", "64", change=constant
    )
    sampler = samples.Sampler(checkpoints.load(str(path)), 7, 10, 0.7, completions=3)
    drawn = sampler.sample(torch.randint(4, 20, (2, 5)), seed=1)
    assert drawn.shape == (2, 3, 7)
    assert drawn.eq(9).all()


def test_sampling_draws_each_token_from_the_k_most_probable_at_the_temperature(place):
    probabilities = torch.zeros(28)
    probabilities[[2, 5, 6, 7]] = torch.tensor([0.4, 0.3, 0.2, 0.1])

    def four_words(model: FairseqLanguageModel) -> None:
        make_unigram(model, probabilities[: model.decoder.project.weight.size(0)].clamp(min=1e-9).log())

    path = write_checkpoint(
        place / "four/model.pt", place / "bin", *scales("vanilla"), "--tokens-per-sample", "64", change=four_words
    )
    sampler = samples.Sampler(checkpoints.load(str(path)), 50, 3, 0.5, completions=4)
    drawn = sampler.sample(torch.randint(4, 20, (30, 5)), seed=2)
    # Squared by the temperature, the fourth left out: 16 : 9 : 4. Symbol 2, the end of a sentence, is one of them.
    counts = drawn.flatten().bincount(minlength=8)[[2, 5, 6]]
    assert counts.sum() == drawn.numel()
    # One standard deviation of the greatest share over 6,000 draws is 0.0064.
    torch.testing.assert_close(counts / drawn.numel(), torch.tensor([16.0, 9.0, 4.0]) / 29, atol=0.02, rtol=0)
    assert torch.equal(drawn, sampler.sample(torch.randint(4, 20, (30, 5)), seed=2))


@pytest.mark.parametrize("name", ["topdown", "haed"])
def test_greedy_samples_equal_the_argmax_of_whole_forward_passes(place, name):
    checkpoint = load(place, name)
    (tokens,) = checkpoints.documents(checkpoint, "test", limit=40)
    prompts, _ = samples.cut_prompts(tokens, 6, 11, 2)
    drawn = samples.Sampler(checkpoint, 11, 1, 0.7).sample(prompts, seed=1)
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


def test_pieces_of_words_are_joined_across_the_samples_words(place):
    dictionary = {1: "un@@", 2: "heard", 3: "of", 4: "</s>", 5: "cut@@"}
    task = SimpleNamespace(source_dictionary=dictionary)
    checkpoint = checkpoints.Checkpoint("here", "model.pt", None, task, OmegaConf.create())
    assert samples.words_of(checkpoint, torch.tensor([1, 2, 3, 4, 5]), "@@ ") == ["unheard", "of", "</s>", "cut"]
    assert samples.words_of(checkpoint, torch.tensor([1, 2, 3]), None) == ["un@@", "heard", "of"]


def test_sample_metrics_prints_every_column_for_every_checkpoint(place, tmp_path, capsys):
    needs_kenlm()
    (tmp_path / "tiny.arpa").write_text(re.sub(r"\b[abc]\b", lambda m: f"w{'abc'.index(m[0])}", ARPA))
    paths = [str(place / "vanilla/model.pt"), f"other={place / 'retina/model.pt'}"]
    sizes = ["--prompts", "3", "--context", "5", "--length", "9", "--completions", "2", "--timed", "1"]
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
        model = ngram_lm.NGramModel(str(tmp_path / "tiny.arpa"))
        assert result["n-gram PPL"] == pytest.approx(ngram_lm.perplexity(model, contexts, words))
        assert result["s/seq"] > 0
    assert "n-gram PPL  Ref-BLEU  repeat-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--context", "40", "--length", "30"], "--context and --length must add up to less than the 64 positions"),
        (["--temperature", "0", "--length", "9"], "--temperature must be above 0: got 0.0"),
        (["--length", "9", "--ngram-lm", "x", "--estimate-ngram-lm"], "must not be given together"),
        (["--length", "9", "--context", "9", "--hf-lm", "nowhere"], "needs the package transformers"),
    ],
)
def test_sample_metrics_refuses_in_one_sentence(place, flags, sentence, monkeypatch, capsys):
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *r: None if name == "transformers" else real(name, *r))
    assert main(["sample-metrics", str(place / "vanilla/model.pt"), *flags]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1
