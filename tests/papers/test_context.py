"""nll-by-frequency and context-shuffle, by brute force and on models of known answers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.models import FairseqLanguageModel

from fairseq_ms.papers import context_shuffle
from fairseq_ms.papers.nll_by_frequency import differences_by_bin, frequency_bins
from tests.helpers.asked import answer
from tests.helpers.trained import TINY, load, make_unigram, random_lines, write_checkpoint, write_corpus


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    data = write_corpus(folder / "bin", {"train": random_lines(1, 60), "test": random_lines(2, 31)})
    flags = [*TINY, "--tokens-per-sample", "32"]
    write_checkpoint(folder / "vanilla/model.pt", data, "vanilla_lm", *flags, "--init-std", "0.3")
    near = ["--scale-windows", "1x=0:3", "--init-std", "0.3"]
    write_checkpoint(folder / "near/model.pt", data, "vanilla_lm", *flags, *near)

    def unigram(model: FairseqLanguageModel) -> None:
        probabilities = torch.arange(1.0, 1 + model.decoder.core.project.weight.size(0))
        make_unigram(model, (probabilities / probabilities.sum()).log())

    write_checkpoint(folder / "unigram/model.pt", data, "vanilla_lm", *flags, change=unigram)
    return folder


@pytest.mark.parametrize("bins", [1, 2, 5, 10])
def test_bins_have_equal_shares_of_the_text_up_to_the_one_symbol_that_straddles_them(bins):
    counts = torch.randint(0, 50, (400,), generator=torch.Generator().manual_seed(bins)).numpy()
    assigned = frequency_bins(counts, bins)
    order = sorted(range(400), key=lambda symbol: (counts[symbol], symbol))
    assert [assigned[symbol] for symbol in order] == sorted(assigned)
    for index in range(bins):
        assert abs(counts[assigned == index].sum() - counts.sum() / bins) <= counts.max()


def test_a_symbol_is_in_the_bin_of_the_middle_of_its_occurrences():
    # In text order a a b b b b c c c c: the middles of a, b and c lie at 1, 4 and 8 of 10.
    assert frequency_bins(np.array([4, 0, 2, 4]), 2).tolist() == [0, 0, 0, 1]
    assert frequency_bins(np.array([4, 0, 2, 4]), 5).tolist() == [2, 0, 0, 4]


def test_bins_of_a_unigram_model_are_the_mean_of_its_log_probabilities(place, tmp_path, capsys):
    paths = [str(place / name / "model.pt") for name in ("unigram", "vanilla")]
    found = answer(tmp_path, "nll-by-frequency", *paths, "--bins", "4", "--context-window", "0")["results"]
    checkpoint = load(place, "unigram")
    train = checkpoint.text("train").tolist()
    test = checkpoint.text("test").tolist()
    symbols = len(checkpoint.dictionary)
    bins = frequency_bins(np.array([train.count(symbol) for symbol in range(symbols)]), 4)
    for index, row in enumerate(found):
        expected = [np.log(sum(range(1, symbols + 1)) / (token + 1)) for token in test if bins[token] == index]
        assert row["tokens"] == len(expected)
        assert row["nll"]["unigram"] == pytest.approx(np.mean(expected), abs=1e-4)
    assert sum(row["tokens"] for row in found) == len(test)
    assert capsys.readouterr().out.splitlines()[0].endswith("unigram  vanilla  vanilla - unigram")


def test_models_differ_in_a_bin_by_their_mean_difference_token_by_token(place, tmp_path):
    paths = [f"{name}={place / name / 'model.pt'}" for name in ("vanilla", "near", "unigram")]
    found = answer(tmp_path, "nll-by-frequency", *paths, "--bins", "4")["results"]
    for row in found:
        assert set(row["difference"]) == {"near", "unigram"}
        for name, (mean, low, high) in row["difference"].items():
            assert mean == pytest.approx(row["nll"][name] - row["nll"]["vanilla"])
            assert low < mean < high
    # Of the same model twice, there is nothing to be told apart.
    near = place / "near/model.pt"
    twice = answer(tmp_path, "nll-by-frequency", f"a={near}", f"b={near}")["results"]
    assert [row["difference"]["b"] == [0.0, 0.0, 0.0] for row in twice] == [row["tokens"] > 1 for row in twice]
    alone = answer(tmp_path, "nll-by-frequency", str(near))["results"]
    assert all(row["difference"] == {} for row in alone)


def test_the_interval_of_a_difference_is_two_standard_errors_and_bins_of_one_token_have_none():
    generator = np.random.default_rng(3)
    tokens, bins = np.array([*generator.integers(0, 4, 400), 4]), np.array([0, 0, 1, 1, 2])
    *found, one, none = differences_by_bin(tokens, generator.normal(0.5, 0.1, 401), bins, 4)
    # About 200 tokens with a deviation of 0.1.
    for mean, low, high in found:
        assert (mean, low, high) == pytest.approx((0.5, 0.486, 0.514), abs=0.02)
        assert high - low == pytest.approx(0.028, abs=0.004)
    assert one is None
    assert none is None


def test_damage_reaches_a_model_of_two_windows_of_three_tokens_exactly_five_tokens_far(place):
    checkpoint = load(place, "near")
    windows = context_shuffle.cut_windows(checkpoint.text("test"), 32, None)
    _, raised = context_shuffle.increase_in_nll(checkpoint, windows, 16, "shuffle", seed=1)
    # Two layers of windows of 3 see 5 tokens: the token at distance d reads those at distances d - 1 .. d - 5.
    assert np.abs(raised[:, :5]).max(0).min() > 1e-3
    np.testing.assert_allclose(raised[:, 5:], 0.0, atol=2e-6)


@pytest.mark.parametrize("how", ["shuffle", "reverse", "replace", "drop"])
def test_increase_equals_single_forward_passes_on_damaged_windows(place, how):
    checkpoint = load(place, "vanilla")
    windows = context_shuffle.cut_windows(checkpoint.text("test"), 20, 6)
    _, raised = context_shuffle.increase_in_nll(checkpoint, windows, 9, how, seed=4, max_tokens=50)
    damaged = None if how == "drop" else context_shuffle.perturb(windows, 9, how, np.random.default_rng(4))

    def nll(source: list[int], target: int) -> float:
        return -checkpoint.model(torch.tensor([source]))[0][0, -1].log_softmax(-1)[target].item()

    for row, window in enumerate(windows.tolist()):
        for distance in (1, 2, 11):
            end = 8 + distance
            broken = [2] if damaged is None else damaged[row].tolist()
            change = nll([*broken, *window[9:end]], window[end]) - nll(window[:end], window[end])
            assert raised[row, distance - 1] == pytest.approx(change, abs=5e-5)


def test_each_kind_of_damage_is_what_its_name_says():
    windows = torch.arange(60).view(4, 15)
    generator = np.random.default_rng(0)
    shuffled = context_shuffle.perturb(windows, 7, "shuffle", generator)
    assert torch.equal(shuffled.sort(1).values, windows[:, :7])
    assert len({tuple((row - row.min()).tolist()) for row in shuffled}) == 4
    assert torch.equal(context_shuffle.perturb(windows, 7, "reverse", generator), windows[:, :7].flip(1))
    replaced = context_shuffle.perturb(windows, 7, "replace", generator)
    assert not (replaced == windows[:, :7]).any()
    assert sorted(replaced[:, 0].tolist()) == windows[:, 0].tolist()


def test_distance_groups_cover_every_distance_once():
    assert context_shuffle.distance_groups(11) == [(1, 1), (2, 3), (4, 7), (8, 11)]
    assert context_shuffle.distance_groups(10) == [(1, 1), (2, 3), (4, 10)]
    groups = context_shuffle.distance_groups(256)
    assert [d for first, last in groups for d in range(first, last + 1)] == list(range(1, 257))


def test_context_shuffle_prints_and_draws_several_checkpoints(place, tmp_path, capsys):
    paths = [str(place / "unigram/model.pt"), f"window={place / 'near/model.pt'}"]
    unigram, window = answer(tmp_path, "context-shuffle", *paths, "--limit", "9")["results"]
    assert [len(unigram["every_distance"]), window["windows"]] == [16, 9]
    assert max(abs(group["increase"]) for group in unigram["by_distance"]) < 2e-6
    for group in window["by_distance"]:
        assert group["low"] <= group["increase"] <= group["high"]
    assert "first 16 of 32 tokens, 9 windows" in capsys.readouterr().out
