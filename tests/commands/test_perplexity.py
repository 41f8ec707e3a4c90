"""`fairseq-ms perplexity` against fairseq-eval-lm, on tiny models of fairseq's own and of this package."""

import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm

from fairseq_ms.cli import main
from fairseq_ms.commands.perplexity import Scored, renormalised
from tests.helpers import trained as made

STREAMING = "streaming_language_modeling"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prepared text (BPE), and checkpoints of models of running text, of lines and with a memory."""
    folder = tmp_path_factory.mktemp("perplexity")
    draw = random.Random(2)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 8))) for _ in range(60)]
    for split, lines in (("train", 200), ("valid", 30), ("test", 41)):
        text = "".join(" ".join(draw.choices(words, k=draw.randint(1, 11))) + "\n" for _ in range(lines))
        (folder / f"{split}.txt").write_text(text)
    flags = ["--tokenise", "none", "--bpe-merges", "30", "--workers", "1", "--quiet"]
    assert main(["prepare", "text", "--input", str(folder), "--out", str(folder / "data"), *flags]) == 0
    data, sizes = folder / "data/bin", [*made.TINY, "--tokens-per-sample", "90"]
    made.write_checkpoint(folder / "model/model.pt", data, "transformer_lm", *sizes)
    made.write_checkpoint(folder / "lines/model.pt", data, "transformer_lm", *sizes, "--sample-break-mode", "eos")
    made.write_checkpoint(folder / "bos/model.pt", data, "vanilla_lm", *sizes, "--add-bos-token", "--init-std", "0.3")
    sizes = [*made.TINY, "--mem-len", "7", "--init-std", "0.3", "--tokens-per-sample", "12"]
    made.write_checkpoint(folder / "memory/model.pt", data, "transformer_xl", *sizes, task=STREAMING)
    return folder


def by_fairseq(place: Path, name: str, *flags: object) -> tuple[float, float]:
    """The loss (base 2) and the perplexity of fairseq-eval-lm."""
    given = [place / "data/bin", "--path", place / name / "model.pt", "--gen-subset", "test", "--cpu"]
    parser = options.get_eval_lm_parser()
    flags = (*given, "--num-workers", 0, *flags)
    args = options.parse_args_and_arch(parser, [str(flag) for flag in flags])
    results = eval_lm.main(convert_namespace_to_omegaconf(args))
    return float(results["loss"]), float(results["perplexity"])


def ours(place: Path, tmp_path: Path, *flags: object, model: str = "model") -> dict[str, Any]:
    """The numbers of `fairseq-ms perplexity`."""
    given = [str(flag) for flag in ("--cpu", "--json", tmp_path / "out.json", *flags)]
    assert main(["perplexity", str(place / model / "model.pt"), *given]) == 0
    return dict(json.loads((tmp_path / "out.json").read_text()))


def counts_of(place: Path, split: str) -> dict[str, int]:
    return dict(json.loads((place / "data/manifest.json").read_text())["splits"][split])


def test_a_model_of_single_lines_is_evaluated_on_single_lines(place, tmp_path):
    found = ours(place, tmp_path, model="lines")
    assert (found["window"], found["stride"]) == (90, 90)
    same = ours(place, tmp_path, "--sample-break-mode", "eos", "--context-window", "0", model="lines")
    assert found["bits_per_target"] == same["bits_per_target"]
    running = ours(place, tmp_path, "--sample-break-mode", "none", model="lines")
    assert running["stride"] == 45
    assert running["bits_per_target"] != found["bits_per_target"]


@pytest.mark.parametrize(("window", "context", "mode"), [(30, 13, "none"), (3, 0, "eos")])
def test_subword_and_word_perplexity_are_those_of_fairseq_eval_lm(place, tmp_path, window, context, mode):
    flags = ["--tokens-per-sample", window, "--context-window", context, "--sample-break-mode", mode]
    results = ours(place, tmp_path, *flags, "--batch-size", "2")
    flags += ["--batch-size", 3]
    assert results["targets"] == counts_of(place, "test")["targets"]
    assert (results["window"], results["stride"]) == (window, window - context)
    loss, by_subword = by_fairseq(place, "model", *flags)
    # fairseq adds up in single precision.
    assert results["bits_per_target"] == pytest.approx(loss, rel=1e-6)
    assert results["perplexity"] == pytest.approx(by_subword, rel=1e-5)
    word_loss, by_word = by_fairseq(place, "model", *flags, "--post-process", "@@ ")
    bits = results["bits_per_target"] * results["targets"]
    assert results["words_with_eol"] + results["words_cut_by_blocks"] == round(bits / word_loss)
    assert results["fairseq_word_perplexity"] == pytest.approx(by_word, rel=1e-5)
    assert (results["words_cut_by_blocks"] == 0) == (mode == "eos")
    if mode == "eos":
        assert results["word_perplexity"] == results["fairseq_word_perplexity"]


def test_an_extra_first_symbol_is_read_as_by_fairseq_eval_lm_and_never_scored(place, tmp_path):
    flags = ["--context-window", 40]
    found = ours(place, tmp_path, *flags, model="bos")
    loss, _ = by_fairseq(place, "bos", *flags, "--tokens-per-sample", 90, "--add-bos-token")
    assert found["targets"] == counts_of(place, "test")["targets"]
    assert found["bits_per_target"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("mode", ["none", "eos"])
@pytest.mark.parametrize("segment", [12, 5])
def test_a_stream_is_evaluated_as_by_fairseq_eval_lm_in_segments_of_any_length(place, tmp_path, segment, mode):
    flags = ["--sample-break-mode", mode, "--tokens-per-sample", segment]
    found = ours(place, tmp_path, *flags, model="memory")
    loss, _ = by_fairseq(place, "memory", "--task", STREAMING, *flags)
    assert found["bits_per_target"] == pytest.approx(loss, rel=1e-6)
    assert (found["window"], found["stride"]) == (segment, segment)
    # Which words fairseq counts twice depends on how many streams it makes of the text.
    assert ("fairseq_word_perplexity" in found) == (mode == "eos")


def test_the_command_prints_the_numbers_and_no_message_of_others(place, tmp_path, capfd):
    results = ours(place, tmp_path)
    printed = capfd.readouterr()
    assert f"word perplexity    {results['word_perplexity']:.4f}" in printed.out
    assert f"over {results['words_with_eol']:,} words and ends of line" in printed.out
    assert f"bits per byte      {results['bits_per_byte']:.4f}" in printed.out
    assert "arning" not in printed.out + printed.err


def test_every_normalisation_divides_the_same_total_of_bits(place, tmp_path):
    results = ours(place, tmp_path, "--gen-subset", "valid")
    counts = counts_of(place, "valid")
    bits = results["bits_per_target"] * counts["targets"]
    text = (place / "data/text/valid.txt").read_text()
    assert results["words_with_eol"] == len(text.split()) + text.count("\n")
    assert math.isclose(results["bits_per_byte"], bits / len(text.encode()), rel_tol=1e-12)
    assert math.isclose(math.log2(results["word_perplexity"]), bits / counts["words_with_eol"], rel_tol=1e-12)
    assert (results["window"], results["stride"]) == (90, 45)


def test_hundreds_of_batches_of_any_size_add_up_without_rounding(tmp_path):
    # Equal sums are rounded in one direction: float32 has lost 1e-6 of the total before it reaches that of WikiText-2.
    lines = made.random_lines(1, 1_200)
    data = made.write_corpus(tmp_path / "data", {"train": lines, "test": lines})
    symbols = len(Dictionary.load(str(data / "dict.txt")))
    made.write_checkpoint(
        *(tmp_path / "uniform/model.pt", data, "vanilla_lm", *made.TINY, "--tokens-per-sample", "8"),
        change=lambda model: made.make_unigram(model, torch.zeros(symbols)),
    )
    for size in (8, 900):
        found = ours(tmp_path, tmp_path, "--context-window", "0", "--batch-size", size, model="uniform")
        # The logarithm itself is one of float32.
        assert math.isclose(found["bits_per_target"], math.log2(symbols), rel_tol=2e-7)
    assert "word_perplexity" not in found, "symbols that may be parts of words"


def test_without_a_manifest_words_are_counted_in_the_data_and_bytes_are_left_out(place, tmp_path, capsys):
    shutil.copytree(place / "data/bin", tmp_path / "alone/bin")
    results = ours(place, tmp_path, "--data", tmp_path / "alone/bin")
    assert results["words_with_eol"] == counts_of(place, "test")["words_with_eol"]
    assert "bits_per_byte" not in results
    assert "needs the manifest.json" in capsys.readouterr().out


def test_a_half_has_the_counts_of_its_folder_where_they_are_of_the_data_scored(place, tmp_path):
    half = place / "data/halves/second"
    assert ours(place, tmp_path, "--data", half)["bits_per_byte"] == ours(place, tmp_path)["bits_per_byte"]
    assert "bits_per_byte" not in ours(place, tmp_path, "--data", half, "--gen-subset", "train")


def test_of_sharded_data_the_manifest_is_that_of_the_first_folder(place, tmp_path):
    shards = f"{place / 'data/bin'}{os.pathsep}{place / 'data/halves/second'}"
    found = ours(place, tmp_path, "--data", shards)
    assert (found["data"], found["manifest"]) == (str(place / "data/bin"), str(place / "data/manifest.json"))
    assert found["bits_per_byte"] == ours(place, tmp_path)["bits_per_byte"]


def test_images_have_bits_per_byte_and_no_words():
    results = renormalised(Scored(6000.0, targets=3000), {"images": 1, "targets": 3000, "bytes": 3000})
    assert results["bits_per_byte"] == 2.0
    assert "word_perplexity" not in results


@pytest.mark.parametrize(
    ("model", "flags", "sentence"),
    [
        ("model", ["--data", "absent"], "--data must be a folder that fairseq-preprocess wrote"),
        ("model", ["--gen-subset", "dev"], "--gen-subset must name a split of"),
        ("model", ["--context-window", "90"], "--context-window must be at least 0 and below the window of 90: got 90"),
        ("model", ["--tokens-per-sample", "91"], "must lie between 1 and the 90 positions of model: got 91"),
        ("lines", ["--context-window", "5"], "--context-window is of running text and of models without a memory"),
        ("model", ["--manifest", "absent.json"], "--manifest must be a file: got absent.json"),
        ("model", ["--manifest", "counts.json"], "--manifest must be of the data that is scored: counts.json counts"),
        ("model", ["--json", "absent/out.json"], "--json must lie in a folder that exists"),
        ("model", ["--data", "bin"], "--data bin has another dictionary than the one"),
        ("model", ["--data", "long", "--sample-break-mode", "eos"], "at most the 90 positions of model, and"),
    ],
)
def test_a_flag_that_cannot_work_is_one_sentence(place, tmp_path, monkeypatch, capsys, model, flags, sentence):
    monkeypatch.chdir(tmp_path)
    manifest = json.loads((place / "data/manifest.json").read_text())
    manifest["splits"]["test"]["targets"] += 1
    Path("counts.json").write_text(json.dumps(manifest))
    shutil.copytree(place / "data/bin", "bin")
    shutil.copytree("bin", "long")
    with open("bin/dict.txt", "a") as file:
        file.write("another 1\n")
    words = Dictionary.load("long/dict.txt")
    builder = made.make_builder("long/test.bin", impl="mmap", vocab_size=len(words))
    builder.add_item(torch.full((91,), 5))
    builder.finalize("long/test.idx")
    assert main(["perplexity", str(place / model / "model.pt"), "--cpu", "--json", "out.json", *flags]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert not Path("out.json").exists()
