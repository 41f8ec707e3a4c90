"""What stands in for fairseq's compiled modules gives what they give."""

import hashlib
import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fairseq import scoring
from omegaconf import OmegaConf

from fairseq_ms.host import uncompiled


def digest(found: object) -> str:
    """Of what fairseq's compiled functions gave for the same, when they were there."""
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def test_batches_are_those_of_the_compiled_function() -> None:
    draw, found = random.Random(3), []
    for _ in range(3000):
        count, longest = draw.randrange(30), draw.randint(1, 19)
        sizes, rows = [draw.randint(0, longest) for _ in range(count)], draw.sample(range(count), count)
        limits = draw.choice([-1, longest, draw.randint(longest, 6 * longest)]), draw.randint(-1, 8), draw.randint(1, 8)
        batches = uncompiled.batch_by_size_vec(np.array(rows), np.array(sizes), *limits)
        by_row = uncompiled.batch_by_size_fn(np.array(rows), dict(zip(rows, sizes)).__getitem__, *limits)
        found.append([batch.tolist() for batch in batches])
        assert [batch.tolist() for batch in by_row] == found[-1]
    assert digest(found) == "dbf350b0881eb789"
    with pytest.raises(AssertionError, match="max_tokens=3"):
        uncompiled.batch_by_size_vec(np.arange(2), np.array([3, 4]), 3, -1, 1)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", "fb33d2b0da7d276b"),
        ("complete", "1cf657e87e22a235"),
        ("complete_doc", "146ee91af52d5f4e"),
        ("eos", "c401804be4f43eb2"),
    ],
)
def test_blocks_and_their_sentences_are_those_of_the_compiled_functions(mode: str, expected: str) -> None:
    draw, found = random.Random(3), []
    for _ in range(1500):
        # At least the end of a line.
        sizes = np.array([draw.randint(1, 8) for _ in range(draw.randint(1, 29))])
        slices = uncompiled.get_slice_indices(sizes, mode, draw.randint(1, 24), draw.randrange(3))
        found.append([slices.tolist(), uncompiled.get_block_to_dataset_index(sizes, slices).tolist()])
    assert digest(found) == expected
    with pytest.raises(ValueError, match="break_mode"):
        uncompiled.get_slice_indices(sizes, "words", 3, 1)


def test_bleu_is_counted_by_sacrebleu_and_another_score_is_what_it_was() -> None:
    asked: list[object] = []
    for choice in ("bleu", OmegaConf.create({"_name": "bleu"}), "wer"):
        uncompiled.by_sacrebleu(lambda *given: asked.append(given), choice, "words")
    assert asked == [("sacrebleu", "words"), ("sacrebleu", "words"), ("wer", "words")]
    scorer = scoring.build_scorer("sacrebleu", None)
    scorer.add_string("a b c d e", "a b c d e")
    assert "100.00" in scorer.result_string()


def test_compiled_modules_stay_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in uncompiled._MODULES:
        compiled = SimpleNamespace()
        monkeypatch.setitem(sys.modules, name, compiled)
        uncompiled.stand_in()
        assert sys.modules[name] is compiled
        monkeypatch.setitem(sys.modules, name, None)
        uncompiled.stand_in()
        assert set(vars(sys.modules[name])) >= set(uncompiled._MODULES[name])
