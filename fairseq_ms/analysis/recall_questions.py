"""The questions of a corpus that ``fairseq-ms prepare recall`` made: where answers stand, and how far back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fairseq import utils
from torch import Tensor

from fairseq_ms.analysis.checkpoints import Checkpoint, documents
from fairseq_ms.errors import UsageError

NAME = "recall.json"


@dataclass(frozen=True)
class Exercises:
    """How passages and questions are written: ``set key passage``, and later ``ask key passage``, a line each.

    Attributes:
        set, ask: the symbols that begin them; without the second, a passage's symbol that was not set is an answer
        key_length, passage_length: how many symbols a key has, which may be none, and a passage
        choices: the symbols that passages consist of
    """

    set: int
    ask: int | None
    key_length: int
    passage_length: int
    choices: Tensor


@dataclass(frozen=True)
class Questions:
    """The symbols that are asked for in a sequence of tokens.

    Attributes:
        tokens: the sequence (n,)
        answers: where they stand (Q,)
        written: where the passage has them (Q,)
        distances: how many tokens before the last one that is read they were written (Q,)
        chance: the accuracy of guessing
    """

    tokens: Tensor
    answers: np.ndarray
    written: np.ndarray
    chance: float

    @property
    def distances(self) -> np.ndarray:
        return self.answers - 1 - self.written


def load_exercises(checkpoint: Checkpoint) -> Exercises:
    """How the checkpoint's data writes its exercises; UsageError where it is no data of such."""
    folder = utils.split_paths(str(checkpoint.task.args.data))[0]
    path = Path(folder) / NAME
    if not path.is_file():
        raise UsageError(
            f"--data must be the folder bin/ that fairseq-ms prepare recall wrote: {folder} holds no {NAME}, which "
            "says how questions are written"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(
            f"--data must be as fairseq-ms prepare recall wrote it: {path} is damaged ({error})"
        ) from error
    index = checkpoint.dictionary.index
    choices = torch.tensor([index(symbol) for symbol in found["choices"]])
    ask = index(found["ask"]) if found["ask"] is not None else None
    return Exercises(index(found["set"]), ask, found["key_length"], found["passage_length"], choices)


def load_questions(checkpoint: Checkpoint, split: str, limit: int | None = None) -> tuple[Questions, Exercises]:
    """The questions of a split, or of its first ``limit`` tokens; UsageError when there are none."""
    exercises = load_exercises(checkpoint)
    questions = find_questions(torch.cat(documents(checkpoint, split, limit)), exercises)
    if not questions.answers.size:
        raise UsageError(f"--gen-subset must name a split with questions: {split!r} has none")
    return questions, exercises


def find_questions(tokens: Tensor, exercises: Exercises) -> Questions:
    """All questions of a sequence whose passage stands before them."""
    text, choices = tokens.tolist(), set(exercises.choices.tolist())
    passages: dict[tuple[int, ...], int] = {}
    answers: list[int] = []
    written: list[int] = []
    behind = 0
    for position, token in enumerate(text):
        if position < behind:
            continue
        sudden = exercises.ask is None and token in choices
        if not sudden and token not in (exercises.set, exercises.ask):
            continue
        first = position if sudden else position + 1 + exercises.key_length
        # The end of the sequence may cut a question short.
        behind = min(first + exercises.passage_length, len(text))
        key = () if sudden else tuple(text[position + 1 : first])
        if token == exercises.set:
            passages[key] = first
        elif key in passages:
            answers += range(first, behind)
            written += range(passages[key], passages[key] + behind - first)
    chance = 1.0 / exercises.choices.numel()
    return Questions(tokens, np.array(answers, dtype=np.int64), np.array(written, dtype=np.int64), chance)
