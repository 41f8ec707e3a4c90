"""Recall by distance: the questions, models whose reach is known, and a future that leaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fairseq_ms.cli import main
from fairseq_ms.errors import UsageError
from fairseq_ms.papers import recall as accuracy
from fairseq_ms.papers.context_length import ContextLength, measured
from fairseq_ms.papers.recall import reach
from fairseq_ms.tools import checkpoints, scoring
from fairseq_ms.tools.checkpoints import Checkpoint
from fairseq_ms_pipeline.recall import Exercises, Recall
from tests.helpers.asked import STREAMING, write_stream
from tests.helpers.trained import NARROW, TINY, load, write_checkpoint, write_corpus

LONGEST, WINDOW = 24, 64
SMALL = Recall(longest=LONGEST, values=8, pairs=3, passage=5, tokens=9000, valid_tokens=300, test_tokens=9000)
RECALL = {
    "passkey": SMALL,
    "announced": replace(SMALL, ask="announced"),
    "pairs": replace(SMALL, task="pairs", ask="announced"),
    "copy": replace(SMALL, task="copy"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recall")
    for task, recall in RECALL.items():
        texts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
        for line in Exercises(recall, seed=1).lines(lambda count: None):
            texts[line.split].append(line.text)
        data = write_corpus(folder / task, texts)
        (data / "recall.json").write_text(json.dumps(recall.description()))
        sizes = [*TINY, "--tokens-per-sample", str(WINDOW)]
        write_checkpoint(folder / f"{task}-model/model.pt", data, "vanilla_lm", *sizes)
    write_stream(folder / "transformer_xl/model.pt", folder / "passkey", "transformer_xl", *STREAMING["transformer_xl"])
    return folder


def asked_of(place: Path, task: str = "passkey") -> tuple[Checkpoint, accuracy.Questions]:
    checkpoint = checkpoints.load(str(place / f"{task}-model/model.pt"))
    return checkpoint, accuracy.load_questions(checkpoint, "test")


@pytest.mark.parametrize("task", RECALL)
def test_questions_are_those_of_the_lines_of_text(place, task):
    checkpoint, asked = asked_of(place, task)
    symbols = checkpoint.dictionary.symbols
    expected = []
    start = 0
    for line in Exercises(RECALL[task], seed=1).lines(lambda count: None):
        if line.split != "test":
            continue
        words = line.text.split()
        first = len(words) - RECALL[task].length
        key = words[words.index("[ask]") + 1 : first] if RECALL[task].announced else []
        (at,) = (n for n, word in enumerate(words) if word == "[set]" and words[n + 1 : n + 1 + len(key)] == key)
        for offset in range(RECALL[task].length):
            answer, written = first + offset, at + 1 + len(key) + offset
            expected.append((start + answer, answer - 1 - written, words[answer]))
        start += len(words) + 1
    found = zip(asked.answers.tolist(), asked.distances.tolist(), (symbols[asked.tokens[n]] for n in asked.answers))
    assert list(found) == expected


@pytest.mark.parametrize("task", RECALL)
def test_the_oracle_is_always_right_and_guessing_one_time_in_eight(place, task):
    _, asked = asked_of(place, task)
    assert accuracy.oracle_answers(asked).all()
    assert asked.chance == 1 / 8
    guessed = accuracy.guessed_answers(asked, seed=1)
    # Four standard deviations of guessing.
    assert guessed.mean() == pytest.approx(1 / 8, abs=4 * (1 / 8 * 7 / 8 / guessed.size) ** 0.5)
    # A misread question would be seen: one place further on, something else was written.
    assert accuracy.oracle_answers(replace(asked, written=asked.written - 1)).mean() < 0.5


class Recaller(nn.Module):
    """A language model that gives the latest value among the last ``sees`` tokens and the ``ahead`` coming ones."""

    def __init__(self, choices: Tensor, vocabulary: int, sees: int, ahead: int = 0) -> None:
        super().__init__()
        self.choices, self.vocabulary, self.sees, self.ahead = choices, vocabulary, sees, ahead
        self.decoder, self.anything = self, nn.Parameter(torch.zeros(()))

    def forward(self, source_BT: Tensor, features_only: bool = True) -> tuple[Tensor, dict[str, Any]]:
        generator = torch.Generator().manual_seed(1)
        logits = torch.rand(*source_BT.shape, self.vocabulary, generator=generator)
        for row, tokens in enumerate(source_BT):
            for now in range(tokens.numel()):
                visible = tokens[max(0, now - self.sees) : now + 1 + self.ahead]
                values = visible[torch.isin(visible, self.choices)]
                if values.numel():
                    logits[row, now, values[-1]] += 9.0
        return logits, {}

    def output_layer(self, features: Tensor) -> Tensor:
        return features

    def get_normalized_probs(self, output: Any, log_probs: bool, sample: Any) -> Tensor:
        return output[0].log_softmax(-1)

    def max_positions(self) -> int:
        return WINDOW


def result_of_recaller(place: Path, sees: int, ahead: int = 0) -> accuracy.Result:
    checkpoint, asked = asked_of(place)
    checkpoint.model = Recaller(asked.choices, len(checkpoint.dictionary), sees, ahead)
    right = accuracy.right_answers(checkpoint, asked, WINDOW, WINDOW // 2, 8192)
    return accuracy.summarise("made up", ContextLength.of(sees, 1), asked, right, bins=LONGEST)


@pytest.mark.parametrize("sees", [1, 7, 16])
def test_a_model_that_sees_so_far_is_right_up_to_there_and_guesses_beyond(place, sees):
    result = result_of_recaller(place, sees)
    for point in result.bins:
        if point.last <= sees:
            assert point.accuracy == 1.0
    assert result.beyond is not None
    assert result.beyond.first == sees + 1
    assert result.beyond.accuracy == pytest.approx(1 / 8, abs=4 * (1 / 8 * 7 / 8 / result.beyond.asked) ** 0.5)
    # A few dozen answers a distance are right by accident one time in eight more or less.
    assert result.recalled == pytest.approx(sees, abs=1.5)
    assert not result.leaks


def test_one_visible_token_of_the_future_shows_as_accuracy_beyond_the_formula(place):
    result = result_of_recaller(place, sees=7, ahead=1)
    assert result.beyond is not None
    # The last token of a window has none after it.
    assert result.beyond.accuracy > 0.95
    assert result.recalled == pytest.approx(LONGEST, abs=1.0)
    assert result.leaks


@pytest.mark.parametrize("arch", STREAMING)
def test_streams_read_side_by_side_score_as_each_alone(models, arch):
    checkpoint = load(models, arch)
    (tokens,) = checkpoint.documents("test")
    pieces = accuracy.at_lines(tokens, checkpoint.dictionary.eos(), 4)
    assert len(pieces) == 4
    assert torch.equal(torch.cat(pieces), tokens)
    assert all(int(piece[-1]) == checkpoint.dictionary.eos() for piece in pieces[:-1])
    together = scoring.score_streams(checkpoint, pieces)
    for piece, scores in zip(pieces, together):
        # In float32, matrix products of another shape round differently.
        np.testing.assert_allclose(scores, scoring.score_documents(checkpoint, [piece]), atol=2e-5)


MEMORIES = {
    "transformer_xl": ["--decoder-layers", "3", "--mem-len", "5"],
    "compressive_transformer": ["--decoder-layers", "3", "--mem-len", "2", "--compressed-mem-len", "2"],
    "transformer_ql": ["--scale-layers", "1x=1,2x=1,4x=1", "--mem-len", "4", "--output-layers", "1"],
}


@pytest.mark.parametrize("arch", MEMORIES)
def test_the_reach_by_formula_is_that_of_the_network_with_its_memory(place, arch):
    sizes = [*NARROW, *MEMORIES[arch], "--tokens-per-sample", "4", "--decoder-normalize-before"]
    path = place / f"{arch} of 4" / "model.pt"
    write_checkpoint(path, place / "passkey", arch, *sizes, task="streaming_language_modeling")
    checkpoint = checkpoints.load(str(path))
    assert reach(checkpoint, 4, 0) == measured(checkpoint.model.decoder.core)


WINDOWED = {
    "vanilla_lm": ["--decoder-layers", "2"],
    "vanilla_lm near": ["--decoder-layers", "3", "--scale-windows", "1x=0:4"],
    "retina_lm": ["--decoder-layers", "2", "--scale-windows", "1x=0:4,4x=4:12"],
    "multiscale_topdown": ["--scale-layers", "8x=1,4x=1,1x=1"],
    "multiscale_bottomup": ["--scale-layers", "8x=1,4x=1,1x=1"],
}


@pytest.mark.parametrize("name", WINDOWED)
def test_the_reach_by_formula_is_that_of_the_network_in_its_windows(place, name):
    sizes = [*NARROW, *WINDOWED[name], "--tokens-per-sample", "40", "--init-std", "0.5"]
    path = write_checkpoint(place / name / "model.pt", place / "passkey", name.split()[0], *sizes)
    checkpoint = checkpoints.load(str(path))
    context = reach(checkpoint, 40, 20)
    model = checkpoint.model.double()
    tokens = torch.randint(4, len(checkpoint.dictionary), (40,), generator=torch.Generator().manual_seed(1))
    # Row p has another symbol at position p.
    changed = tokens.repeat(40, 1)
    changed.fill_diagonal_(4)[tokens == 4, tokens == 4] = 5
    with torch.no_grad():
        moved = (model(changed)[0] - model(tokens[None])[0]).abs().amax(-1) > 1e-12
    farthest = [output - int(moved[:, output].nonzero()[0]) for output in range(20, 40)]
    assert min(farthest) == context.minimum
    assert max(farthest) == context.maximum - 1


def test_the_command_prints_both_tables_and_writes_both_files(place, tmp_path, capsys):
    models = [f"{name}={place / name}/model.pt" for name in ("transformer_xl", "passkey-model")]
    files = ["--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]
    data = ["--data", str(place / "passkey")]
    assert main(["recall", *models, *data, "--bins", "4", "--limit", "4000", "--cpu", *files]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "accuracy of recall by distance in tokens; chance is 0.125"
    assert [line.split()[0] for line in printed[3:8]] == ["1-6", "7-12", "13-18", "19-24", "all"]
    assert [line.split()[2] for line in printed[3:8]] == ["1"] * 5
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [model["context"]["average"] for model in found["models"]] == [14.0, 48.0]
    assert not any(model["leaks"] for model in found["models"])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_data_without_questions_is_refused_in_one_sentence(place, tmp_path, capsys):
    data = write_corpus(tmp_path / "other", {"train": ["a b c"], "test": ["a b"]})
    model = str(write_checkpoint(tmp_path / "model/model.pt", data, "vanilla_lm", *TINY, "--tokens-per-sample", "8"))
    assert main(["recall", model]) == 2
    assert "holds no recall.json" in capsys.readouterr().err
    (data / "recall.json").write_text(json.dumps(RECALL["passkey"].description()))
    with pytest.raises(UsageError, match="'test' has none"):
        accuracy.load_questions(checkpoints.load(model), "test")
    (data / "recall.json").write_text("{")
    with pytest.raises(UsageError, match=r"--data must be as fairseq-ms prepare recall wrote it: .* is damaged"):
        accuracy.load_questions(checkpoints.load(model), "test")
