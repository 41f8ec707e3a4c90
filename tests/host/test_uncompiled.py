"""What stands in for fairseq's compiled modules gives what their rules say, row by row."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import torch
from fairseq.scoring.bleu import Scorer

from fairseq_ms.host import uncompiled

RNG = np.random.default_rng(3)


def batches(sizes: list[int], max_tokens: int, max_rows: int, multiple: int) -> list[list[int]]:
    """Rows one after the other: a batch and those after it that do not make it whole yet."""

    def fits(rows: list[int]) -> bool:
        tokens = max(sizes[row] for row in rows) * len(rows)
        return not (len(rows) > max_rows > 0) and not tokens > max_tokens > 0

    found: list[list[int]] = []
    batch, tail = list[int](), list[int]()
    for row in range(len(sizes)):
        tail = [*tail, row]
        whole = len(batch + tail) < multiple or len(batch + tail) % multiple == 0
        if not fits(batch + tail):
            found.append(batch)
            if max(sizes[row] for row in tail) * len(tail) > max_tokens > 0:
                found.append(tail[:-1])
                tail = [row]
            batch, tail = tail, []
        elif whole:
            batch, tail = batch + tail, []
    return [rows for rows in (*found, batch, tail) if rows]


@pytest.mark.parametrize("least", [0, 1])
def test_batches_are_those_of_the_rule(least: int) -> None:
    for _ in range(1500):
        count, longest = int(RNG.integers(0, 30)), int(RNG.integers(1, 20))
        sizes, rows = RNG.integers(least, longest + 1, count), RNG.permutation(count)
        limits = int(RNG.choice([-1, longest, int(RNG.integers(longest, 6 * longest + 1))])), int(RNG.integers(-1, 9))
        multiple = int(RNG.integers(1, 9))
        found = uncompiled.batch_by_size_vec(rows, sizes, *limits, multiple)
        expected = [[rows[place] for place in batch] for batch in batches(sizes.tolist(), *limits, multiple)]
        assert [batch.tolist() for batch in found] == expected
        by_row = dict(zip(rows.tolist(), sizes.tolist()))
        again = uncompiled.batch_by_size_fn(rows, by_row.__getitem__, *limits, multiple)
        assert [batch.tolist() for batch in again] == expected
    with pytest.raises(AssertionError, match="max_tokens=3"):
        uncompiled.batch_by_size_vec(np.arange(2), np.array([3, 4]), 3, -1, 1)


def blocks(sizes: list[int], mode: str, most: int, separator: int) -> list[tuple[int, int]]:
    """Sentences one after the other, of which a block has as many as fit, and at least one."""
    found, begin, length = [], 0, 0
    for size in sizes:
        ends = mode == "complete_doc" and size == separator
        if length and (ends or length + size > most):
            found.append((begin, begin + length))
            begin, length = begin + length, 0
        if ends:
            begin += size
        else:
            length += size
    found.append((begin, begin + length))
    return [(first, last) for first, last in found if last - first > (mode == "complete_doc")]


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
def test_blocks_and_their_sentences_are_those_of_the_rule(mode: str) -> None:
    for _ in range(1500):
        # At least the end of a line.
        sizes = RNG.integers(1, 9, int(RNG.integers(1, 30)))
        most, separator = int(RNG.integers(1, 25)), int(RNG.integers(0, 3))
        ends = sizes.cumsum()
        expected = {
            "none": [(first, min(first + most, ends[-1])) for first in range(0, ends[-1], most)],
            "eos": list(zip(ends - sizes, ends)),
        }.get(mode) or blocks(sizes.tolist(), mode, most, separator)
        slices = uncompiled.get_slice_indices(sizes, mode, most, separator)
        assert slices.tolist() == [list(pair) for pair in expected]
        if mode == "eos":
            continue
        # The sentence of every token, in a list as long as the corpus.
        owner = np.repeat(np.arange(len(sizes)), sizes)
        for (first, last), (sentence, offset, end) in zip(slices, uncompiled.get_block_to_dataset_index(sizes, slices)):
            assert (owner[first], owner[last - 1]) == (sentence, end)
            assert first == ends[sentence] - sizes[sentence] + offset
    with pytest.raises(ValueError, match="break_mode"):
        uncompiled.get_slice_indices(sizes, "words", 3, 1)


def test_bleu_is_sacrebleu_s_but_for_unknown_words_and_the_ends_of_lines() -> None:
    pad, eos, unk = 1, 2, 3
    scorer, ours = Scorer.__new__(Scorer), uncompiled.NgramCounts
    ours.begin(Scorer.__init__, scorer, SimpleNamespace(pad=pad, eos=eos, unk=unk))
    texts, references = [], []
    for _ in range(20):
        reference = RNG.integers(4, 9, int(RNG.integers(5, 30)))
        text = np.where(RNG.random(len(reference)) < 0.8, reference, RNG.integers(4, 9, len(reference)))
        reference[RNG.integers(len(reference))] = unk
        ours.add(Scorer.add, scorer, torch.IntTensor([*reference, eos]), torch.IntTensor([pad, *text, eos, pad]))
        texts.append(" ".join(map(str, text)))
        references.append(" ".join("unknown" if word == unk else str(word) for word in reference))
    expected = sacrebleu.corpus_bleu(texts, [references], tokenize="none", smooth_method="none").score
    assert scorer.score() == pytest.approx(expected)
    ours.reset(Scorer.reset, scorer, one_init=True)
    assert scorer.stat.match1 == 0
    assert scorer.stat.count4 == 1


def test_compiled_modules_stay_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in uncompiled._MODULES:
        compiled = SimpleNamespace()
        monkeypatch.setitem(sys.modules, name, compiled)
        uncompiled.stand_in()
        assert sys.modules[name] is compiled
        monkeypatch.setitem(sys.modules, name, None)
        uncompiled.stand_in()
        assert set(vars(sys.modules[name])) >= set(uncompiled._MODULES[name])
