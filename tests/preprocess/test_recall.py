"""Exercises in recall: what is asked was written, at the distance that the flags allow."""

import functools
import json
from pathlib import Path

import pytest

from fairseq_ms_pipeline.recall import ASK, FILLERS, SET, TASKS, Exercises, Recall
from tests.preprocess.sample import prepare


@functools.cache
def exercises(recall: Recall, seed: int) -> list[tuple[str, str]]:
    """The split and the text of every line."""
    return [(line.split, line.text) for line in Exercises(recall, seed).lines(lambda count: None)]


def lines(recall: Recall, split: str, seed: int = 1) -> list[list[str]]:
    return [text.split() for of, text in exercises(recall, seed) if of == split]


def small(task: str, filler: str = "constant", ask: str = "announced", **more: int) -> Recall:
    sizes = {"tokens": 4000, "valid_tokens": 300, "test_tokens": 4000, "longest": 40}
    return Recall(task=task, filler=filler, ask=ask, **{**sizes, **more})


def distances(words: list[str], recall: Recall) -> list[int]:
    """How many tokens before the last one that is read each symbol of the answer was written, found by hand."""
    length = recall.length
    assert (ASK in words) == recall.announced
    key = words[words.index(ASK) + 1 : len(words) - length] if recall.announced else []
    (place,) = (n for n, word in enumerate(words) if word == SET and words[n + 1 : n + 1 + len(key)] == key)
    first = place + 1 + len(key)
    assert words[first : first + length] == words[-length:]
    return [len(words) - length + offset - 1 - (first + offset) for offset in range(length)]


KINDS = [*((task, "announced") for task in TASKS), ("passkey", "suddenly"), ("copy", "suddenly")]


@pytest.mark.parametrize(("task", "ask"), KINDS)
def test_every_answer_was_written_once_at_a_distance_between_the_shortest_and_the_longest(task, ask):
    recall = small(task, ask=ask)
    # The pair that is asked for may be the last of the pairs.
    least = 2 if task == "pairs" else recall.shortest
    for split in ("train", "test"):
        found = {distance for words in lines(recall, split) for distance in distances(words, recall)}
        assert least <= min(found)
        assert max(found) <= 40
    # Among 150 or more test lines hardly a fifth of the distances can be missing.
    assert len(found) >= 0.8 * (40 - least + 1)


@pytest.mark.parametrize("task", TASKS)
def test_test_distances_are_even_and_training_distances_mostly_short(task):
    recall = small(task)
    train, test = ([distances(words, recall)[0] for words in lines(recall, split)] for split in ("train", "test"))
    middle = (min(test) + 40) / 2
    # Two standard deviations of 60 or more draws are below 0.13.
    assert abs(sum(d > middle for d in test) / len(test) - 0.5) < 0.15
    assert sum(d > middle for d in train) / len(train) < 0.35


def test_keys_of_a_line_differ_and_one_of_them_is_asked_for():
    for words in lines(small("pairs", pairs=5), "test"):
        keys = [words[n + 1] for n, word in enumerate(words) if word == SET]
        assert len(set(keys)) == 5
        assert words[-2] in keys


@pytest.mark.parametrize("filler", FILLERS)
def test_filler_holds_no_symbol_of_an_exercise(filler):
    recall = small("passkey", filler)
    meant = {SET, ASK, *recall.symbols()}
    fill = [word for words in lines(recall, "test") for word in words[2:-2]]
    assert not meant & set(fill)
    kinds = len(set(fill))
    assert kinds == {"constant": 1, "counting": 16}.get(filler, kinds)
    assert filler != "docs" or kinds > 200


def test_one_seed_gives_the_same_exercises_and_another_seed_others():
    recall = small("copy")
    assert exercises(recall, 1) == exercises.__wrapped__(recall, 1)
    assert lines(recall, "test") != lines(recall, "test", seed=2)
    assert lines(recall, "test") != lines(recall, "valid")


def test_the_script_writes_binarised_exercises_and_what_an_analysis_has_to_know(tmp_path: Path):
    flags = ["--exercise", "pairs", "--pairs", "2", "--values", "8", "--longest", "30", "--tokens", "3000"]
    command = ("recall", "--out", str(tmp_path / "out"), "--test-tokens", "900", *flags)
    prepare(*command)
    known = json.loads((tmp_path / "out" / "bin" / "recall.json").read_text())
    symbols = {line.split()[0] for line in (tmp_path / "out" / "bin" / "dict.txt").read_text().splitlines()}
    assert {known["set"], known["ask"], *known["choices"]} <= symbols
    assert (known["key_length"], known["passage_length"]) == (1, 1)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["settings"]["recall"]["longest"] == 30
    assert all(counts["unknown"] == 0 for counts in manifest["splits"].values())
    assert "prepared already" in prepare(*command).stdout


def test_filler_of_documentation_is_of_one_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = ("--filler", "docs", "--longest", "30", "--tokens", "3000", "--test-tokens", "900")
    prepare("recall", "--out", tmp_path / "out", *sizes)
    monkeypatch.setattr("platform.python_version", lambda: "4.0.0")
    assert "(python is " in prepare("recall", "--out", tmp_path / "out", *sizes, check=False).stderr
