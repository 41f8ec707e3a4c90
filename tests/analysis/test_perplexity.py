"""`fairseq-ms perplexity` against fairseq-eval-lm, on a tiny model of fairseq's own trained for a few updates."""

import argparse
import json
import math
import random
import re
import shutil

import pytest
import torch
from fairseq.data import Dictionary, indexed_dataset

from fairseq_ms.analysis.perplexity import command
from fairseq_ms.analysis.perplexity.renormalise import Scored, count_targets, renormalised
from fairseq_ms.errors import UsageError
from tests.helpers import trained as made
from tests.helpers.cli import ROOT, USER_DIR, run_cli


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with prepared text (BPE) and a checkpoint of fairseq's transformer_lm."""
    folder = tmp_path_factory.mktemp("perplexity")
    draw = random.Random(2)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 8))) for _ in range(60)]
    for split, lines in (("train", 200), ("valid", 30), ("test", 41)):
        text = "".join(" ".join(draw.choices(words, k=draw.randint(1, 11))) + "\n" for _ in range(lines))
        (folder / f"{split}.txt").write_text(text)
    script = ROOT / "preprocess" / "text" / "prepare.py"
    flags = ["--tokenise", "none", "--bpe-merges", "30", "--workers", "1", "--quiet"]
    run_cli("python", script, "--input", folder, "--out", folder / "data", *flags)
    train(folder, "model")
    return folder


def train(folder, name, *flags):
    command = ["fairseq-train", folder / "data" / "bin", "--task", "language_modeling", "--cpu", "--seed", "1"]
    command += ["--arch", "transformer_lm", "--decoder-layers", "1", "--decoder-embed-dim", "16"]
    command += ["--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2", "--no-epoch-checkpoints"]
    command += ["--optimizer", "adam", "--lr", "0.01", "--max-update", "10", "--batch-size", "4"]
    command += ["--tokens-per-sample", "90", "--save-dir", folder / name, "--num-workers", "0"]
    run_cli(*command, "--disable-validation", "--log-format", "none", *flags)


def by_fairseq(folder, window, context, mode, *post_process):
    """The loss (base 2) and the perplexity that fairseq-eval-lm prints."""
    command = ["fairseq-eval-lm", folder / "data" / "bin", "--path", folder / "model" / "checkpoint_last.pt"]
    command += ["--gen-subset", "test", "--tokens-per-sample", str(window), "--context-window", str(context)]
    command += ["--sample-break-mode", mode, "--batch-size", "3", "--cpu", "--num-workers", "0"]
    # The plugin gives NumPy 2 back what fairseq's break mode eos uses of NumPy 1.
    done = run_cli(*command, "--user-dir", USER_DIR, *post_process)
    found = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", done.stdout + done.stderr)
    assert found is not None, done.stdout + done.stderr
    return float(found.group(1)), float(found.group(2))


def ours(folder, tmp_path, *flags, model="model"):
    """The numbers of `fairseq-ms perplexity`."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = [str(flag) for flag in ("--cpu", "--json", tmp_path / "out.json", *flags)]
    assert command.run(parser.parse_args([str(folder / model / "checkpoint_last.pt"), *given])) == 0
    return json.loads((tmp_path / "out.json").read_text())


def test_a_model_of_single_lines_is_evaluated_on_single_lines(trained, tmp_path):
    # The plugin gives NumPy 2 back what fairseq's break mode eos uses of NumPy 1.
    train(trained, "lines", "--sample-break-mode", "eos", "--user-dir", USER_DIR)
    found = ours(trained, tmp_path, model="lines")
    assert (found["window"], found["stride"]) == (90, 90)
    same = ours(trained, tmp_path, "--sample-break-mode", "eos", "--context-window", "0", model="lines")
    assert found["bits_per_target"] == same["bits_per_target"]
    running = ours(trained, tmp_path, "--sample-break-mode", "none", model="lines")
    assert running["stride"] == 45
    assert running["bits_per_target"] != found["bits_per_target"]


@pytest.mark.parametrize(("window", "context", "mode"), [(30, 13, "none"), (31, 0, "eos")])
def test_subword_and_word_perplexity_are_those_of_fairseq_eval_lm(trained, tmp_path, window, context, mode):
    flags = ["--tokens-per-sample", window, "--context-window", context, "--sample-break-mode", mode]
    results = ours(trained, tmp_path, *flags, "--batch-size", "2")
    counts = json.loads((trained / "data" / "manifest.json").read_text())["splits"]["test"]
    assert results["targets"] == counts["targets"]
    assert (results["window"], results["stride"]) == (window, window - context)
    if mode == "none":
        loss, by_subword = by_fairseq(trained, window, context, mode)
        assert abs(results["bits_per_target"] - loss) < 6e-5  # fairseq prints four digits of its loss,
        assert abs(results["perplexity"] - by_subword) < 6e-3  # and two of its perplexity
    word_loss, by_word = by_fairseq(trained, window, context, mode, "--post-process", "@@ ")
    bits = results["bits_per_target"] * results["targets"]
    words = results["words_with_eol"] + results["words_cut_by_blocks"]
    assert words == round(bits / word_loss)
    # The exponential makes four digits of the loss into fewer of the perplexity.
    assert math.isclose(results["fairseq_word_perplexity"], by_word, rel_tol=1e-4)
    assert (results["words_cut_by_blocks"] == 0) == (mode == "eos")
    if mode == "eos":
        assert results["word_perplexity"] == results["fairseq_word_perplexity"]


def test_the_command_prints_the_numbers_and_no_message_of_others(trained, tmp_path):
    command = ["fairseq-ms", "perplexity", trained / "model" / "checkpoint_last.pt", "--cpu"]
    done = run_cli(*command, "--json", tmp_path / "out.json")
    results = json.loads((tmp_path / "out.json").read_text())
    assert f"word perplexity    {results['word_perplexity']:.4f}" in done.stdout
    assert f"over {results['words_with_eol']:,} words and ends of line" in done.stdout
    assert f"bits per byte      {results['bits_per_byte']:.4f}" in done.stdout
    assert "arning" not in done.stdout + done.stderr


def test_every_normalisation_divides_the_same_total_of_bits(trained, tmp_path):
    results = ours(trained, tmp_path, "--gen-subset", "valid")
    counts = json.loads((trained / "data" / "manifest.json").read_text())["splits"]["valid"]
    bits = results["bits_per_target"] * counts["targets"]
    text = (trained / "data" / "text" / "valid.txt").read_text()
    assert results["words_with_eol"] == len(text.split()) + text.count("\n")
    assert math.isclose(results["bits_per_byte"], bits / len(text.encode()), rel_tol=1e-12)
    assert math.isclose(math.log2(results["word_perplexity"]), bits / counts["words_with_eol"], rel_tol=1e-12)
    assert (results["window"], results["stride"]) == (90, 45)


def test_the_total_does_not_depend_on_the_batch_size(trained, tmp_path):
    losses = [ours(trained, tmp_path, "--batch-size", size)["bits_per_target"] for size in ("1", "7")]
    # Sums of float32 in another order.
    assert math.isclose(*losses, rel_tol=1e-6)


def test_hundreds_of_batches_add_up_without_rounding(tmp_path):
    # Equal sums are rounded in one direction: float32 has lost 1e-6 of the total before it reaches that of WikiText-2.
    lines = made.random_lines(1, 1_200)
    data = made.write_corpus(tmp_path / "data", {"train": lines, "test": lines})
    symbols = len(Dictionary.load(str(data / "dict.txt")))
    flags = [*made.TINY, "--tokens-per-sample", "8"]
    made.write_checkpoint(
        tmp_path / "uniform" / "checkpoint_last.pt",
        data,
        "vanilla_lm",
        *flags,
        change=lambda model: made.make_unigram(model, torch.zeros(symbols)),
    )
    found = ours(tmp_path, tmp_path, "--context-window", "0", "--batch-size", "8", model="uniform")
    # The logarithm itself is one of float32.
    assert math.isclose(found["bits_per_target"], math.log2(symbols), rel_tol=2e-7)


def test_without_a_manifest_words_are_counted_in_the_data_and_bytes_are_left_out(trained, tmp_path, capsys):
    shutil.copytree(trained / "data" / "bin", tmp_path / "alone" / "bin")
    results = ours(trained, tmp_path, "--data", tmp_path / "alone" / "bin")
    counts = json.loads((trained / "data" / "manifest.json").read_text())["splits"]["test"]
    assert results["words_with_eol"] == counts["words_with_eol"]
    assert "bits_per_byte" not in results
    assert "needs the manifest.json" in capsys.readouterr().out


def test_counting_scored_targets_leaves_contexts_padding_and_batches_alone():
    dictionary = Dictionary()
    for symbol in ("a@@", "b", "c@@"):
        dictionary.add_symbol(symbol)
    a, b, c, pad, eos = 4, 5, 6, dictionary.pad(), dictionary.eos()
    batches = [
        {"net_input": {}, "target": torch.tensor([[pad, pad, a, b], [a, c, b, a]]), "start_indices": [2, 1]},
        {"net_input": {}, "target": torch.tensor([[b, eos, pad]])},
        {},
    ]
    scored = Scored()
    assert [id(batch) for batch in count_targets(batches, dictionary, scored)] == [id(batch) for batch in batches]
    assert scored == Scored(targets=7, unfinished=3, cut=1)
    assert scored.words == 4


def test_images_have_bits_per_byte_and_no_words():
    results = renormalised(6000.0, Scored(targets=3000), {"images": 1, "targets": 3000, "bytes": 3000})
    assert results["bits_per_byte"] == 2.0
    assert "word_perplexity" not in results


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--data", "absent"], "--data must be a folder that fairseq-preprocess wrote, with dict.txt in it"),
        (["--gen-subset", "dev"], "--gen-subset must be a split of --data"),
        (["--context-window", "90"], "--context-window must be at least 0 and less than --tokens-per-sample 90"),
        (["--tokens-per-sample", "0"], "--tokens-per-sample must be at least 1: got 0"),
        (["--manifest", "absent.json"], "--manifest must be a file: got absent.json"),
        (["--json", "absent/out.json"], "--json must lie in a folder that exists"),
    ],
)
def test_a_flag_that_cannot_work_is_one_sentence(trained, tmp_path, monkeypatch, flags, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=sentence):
        ours(trained, tmp_path, *flags)
    assert list(tmp_path.iterdir()) == []


def test_counts_of_other_data_and_another_dictionary_are_refused(trained, tmp_path):
    manifest = json.loads((trained / "data" / "manifest.json").read_text())
    manifest["splits"]["test"]["targets"] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="--manifest must be of the data that is scored"):
        ours(trained, tmp_path, "--manifest", tmp_path / "manifest.json")
    shutil.copytree(trained / "data" / "bin", tmp_path / "bin")
    with open(tmp_path / "bin" / "dict.txt", "a") as file:
        file.write("another 1\n")
    with pytest.raises(UsageError, match="has another dictionary than the one"):
        ours(trained, tmp_path, "--data", tmp_path / "bin")
    assert not (tmp_path / "out.json").exists()


def test_every_target_of_the_split_is_in_the_binarised_data(trained):
    data = indexed_dataset.make_dataset(str(trained / "data" / "bin" / "test"), impl="mmap")
    counts = json.loads((trained / "data" / "manifest.json").read_text())["splits"]["test"]
    assert sum(len(data[i]) for i in range(len(data))) == counts["targets"]
