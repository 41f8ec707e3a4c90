"""Loading checkpoints and scoring tokens, against one forward pass a token."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import checkpoints, comparison, report, scoring
from fairseq_ms_pipeline.files import complete
from tests.helpers.trained import TINY, random_lines, write_checkpoint, write_corpus


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scoring")
    write_corpus(folder / "bin", {"train": random_lines(1, 40), "test": random_lines(2, 11)})
    flags = [*TINY, "--tokens-per-sample", "26", "--scale-windows", "1x=0:4,4x=4:28"]
    write_checkpoint(folder / "retina/model.pt", folder / "bin", "retina_lm", *flags)
    return folder


def load(place: Path, **options: Any) -> checkpoints.Checkpoint:
    return checkpoints.load(str(place / "retina/model.pt"), **options)


def naive_nll(checkpoint: checkpoints.Checkpoint, tokens: torch.Tensor, window: int, context: int) -> np.ndarray:
    """One forward pass a token, from the definition of window and stride."""
    source = [checkpoint.dictionary.eos(), *tokens.tolist()]
    stride = window - context
    nll = []
    for position, token in enumerate(tokens.tolist()):
        start = max(0, position // stride * stride - context)
        logits = checkpoint.model(torch.tensor([source[start : position + 1]]))[0][0, -1]
        nll.append(-logits.log_softmax(-1)[token].item())
    return np.array(nll)


@pytest.mark.parametrize(
    ("window", "context", "max_tokens"), [(26, 13, 60), (26, 0, 8192), (9, 8, 1), (7, 3, 60), (7, 3, 8192)]
)
def test_every_token_is_scored_once_with_the_context_of_its_window(place, window, context, max_tokens):
    checkpoint = load(place)
    (tokens,) = checkpoint.documents("test", limit=101)
    nll = scoring.score_documents(checkpoint, [tokens], window, context, max_tokens)
    assert nll.shape == (101,)
    # Batches of other shapes add up in another order; single precision has 7 digits.
    np.testing.assert_allclose(nll, naive_nll(checkpoint, tokens, window, context), atol=2e-5)


@pytest.mark.parametrize(("window", "context"), [(26, 13), (26, 0), (9, 7), (7, 3)])
def test_a_text_begins_with_the_extra_first_symbol_alone_where_it_is_asked_to(place, window, context):
    flags = [*TINY, "--tokens-per-sample", "26", "--add-bos-token"]
    path = write_checkpoint(place / "bos/model.pt", place / "bin", "vanilla_lm", *flags)
    checkpoint = checkpoints.load(str(path))
    checkpoint.model.double()
    texts = [tokens[:length] for tokens, length in zip(checkpoint.documents("test", limit=99) * 3, (61, 5, 40))]
    found = scoring.score_documents(checkpoint, texts, window, context, 60, bos_alone=True)
    expected = []
    for text in texts:
        for position, token in enumerate(text.tolist()):
            start = max(0, position // (window - context) * (window - context) - context)
            source = [checkpoint.dictionary.bos(), *text[max(0, start - 1) : position].tolist()]
            logits = checkpoint.model(torch.tensor([source]))[0][0, -1]
            expected.append(-logits.log_softmax(-1)[token].item())
    # Log-probabilities are float32.
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_lines_of_any_length_are_read_on_their_own_where_training_broke_samples_at_lines(place):
    flags = [*TINY, "--tokens-per-sample", "26", "--sample-break-mode", "eos"]
    path = write_checkpoint(place / "eos/model.pt", place / "bin", "vanilla_lm", *flags)
    checkpoint = checkpoints.load(str(path))
    lines = checkpoint.documents("test")
    assert len(lines) == 11
    lines = [line[: 1 + index % 4 * 5] for index, line in enumerate(lines)]
    expected = np.concatenate([scoring.score_documents(checkpoint, [line]) for line in lines])
    for max_tokens in (20, 8192):
        found = scoring.score_documents(checkpoint, lines, max_tokens=max_tokens)
        np.testing.assert_allclose(found, expected, atol=2e-5)
    with_context = scoring.score_documents(checkpoint, lines, 9, 4)
    np.testing.assert_allclose(with_context[7:18], naive_nll(checkpoint, lines[2], 9, 4), atol=2e-5)


def test_adaptive_softmax_gives_the_probabilities_of_the_whole_vocabulary(place):
    flags = [*TINY, "--tokens-per-sample", "26", "--adaptive-softmax-cutoff", "9,15"]
    path = write_checkpoint(place / "adaptive/model.pt", place / "bin", "vanilla_lm", *flags)
    checkpoint = checkpoints.load(str(path))
    (tokens,) = checkpoint.documents("test", limit=20)
    source = torch.cat([tokens.new_tensor([2]), tokens[:-1]])[None]
    each = [scoring.score_windows(checkpoint, source, torch.full_like(source, token)) for token in range(27)]
    total = torch.stack(each).neg().exp().sum(0)
    torch.testing.assert_close(total, torch.ones(1, 20), atol=1e-5, rtol=0)


@pytest.mark.parametrize("flags", [["--segmentation", "words", "--separators", "w0"], ["--segmentation", "fixed"]])
def test_chunks_of_a_hierarchical_model_begin_anew_in_every_window(place, flags):
    path = write_checkpoint(place / "haed/model.pt", place / "bin", "haed", *flags, "--tokens-per-sample", "26")
    checkpoint = checkpoints.load(str(path))
    (tokens,) = checkpoint.documents("test", limit=31)
    nll = scoring.score_documents(checkpoint, [tokens], 26, 13)
    np.testing.assert_allclose(nll, naive_nll(checkpoint, tokens, 26, 13), atol=2e-5)


def test_a_model_without_decoder_is_refused_with_its_criterion(place):
    flags = ["--criterion", "in_batch_sampled_softmax", "--tokens-per-sample", "26"]
    path = write_checkpoint(place / "iem/model.pt", place / "bin", "haed", *flags)
    with pytest.raises(UsageError, match="--criterion in_batch_sampled_softmax and has no decoder"):
        checkpoints.load(str(path))


def test_two_checkpoints_of_one_label_are_refused(place):
    path = str(place / "retina/model.pt")
    args = Namespace(checkpoints=[path, path], data=None, cpu=True, command="recall")
    with pytest.raises(UsageError, match="label of its own, as in NAME=FILE: got 'retina' twice"):
        comparison.load(args)
    args.checkpoints[1] = f"other={path}"
    assert [loaded.label for loaded in comparison.load(args)] == ["retina", "other"]


def test_bootstrap_band_holds_the_mean_as_often_as_it_says():
    generator = np.random.default_rng(3)
    hits = 0
    for trial in range(200):
        low, high = comparison.bootstrap_band(generator.normal(size=(60, 1)), seed=trial, resamples=400)
        hits += int(low[0] <= 0.0 <= high[0])
    assert 180 <= hits <= 198  # 190 expected, standard deviation 3


def test_files_are_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "figure.png"

    def fail(figure: object) -> None:
        raise RuntimeError("no figure")

    def end_halfway(part: Path) -> None:
        part.write_text("half of it")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no figure"):
        report.write_png(str(target), fail)
    with pytest.raises(RuntimeError, match="no space"), complete(target) as part:
        end_halfway(part)
    with pytest.raises(ValueError, match="Out of range float"):
        report.write_json(str(tmp_path / "out.json"), {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_table_aligns_words_left_and_numbers_right():
    table = report.format_table(["name", "x"], [["a", 1.5], ["long", None]])
    assert table.splitlines() == ["name    x", "----  ---", "a     1.5", "long    -"]
