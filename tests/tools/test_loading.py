"""What analyses read of checkpoints and of data: once, and without holding a corpus."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, tasks
from fairseq.data import Dictionary

from fairseq_ms.commands import perplexity
from fairseq_ms.errors import UsageError
from fairseq_ms.tools import checkpoints, whole_files
from tests.helpers import trained
from tests.helpers.corpus import large_data

SYMBOLS = 40


def asked_about(data: Path) -> checkpoints.Checkpoint:
    """A checkpoint whose data these are, as far as counting goes."""
    words = Dictionary()
    for index in range(SYMBOLS - len(words)):
        words.add_symbol(f"w{index}")
    task = SimpleNamespace(source_dictionary=words, args=SimpleNamespace(data=str(data)))
    return checkpoints.Checkpoint("", "", None, task, None)  # type: ignore[arg-type]


def test_token_counts_are_taken_without_holding_the_file(tmp_path: Path) -> None:
    whole = large_data(tmp_path, 2_000_000, 500)
    tokens = np.random.default_rng(1).integers(0, SYMBOLS, 2_000_000, dtype=np.uint16)
    tokens.tofile(whole / "train.bin")
    tracemalloc.start()
    counts = asked_about(whole).token_counts()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts.tolist() == np.bincount(tokens, minlength=SYMBOLS).tolist()
    # Holding the tokens once as int64 would take four times their bytes.
    assert peak < 2 * tokens.nbytes, f"{peak / tokens.size:.1f} bytes a token"


def test_tokens_of_text_that_is_not_binarised_are_counted_line_by_line(tmp_path: Path) -> None:
    checkpoint = asked_about(tmp_path)
    (tmp_path / "train").write_text("w1 w2 w1\nw35\n")
    counts = checkpoint.token_counts()
    assert {int(symbol): int(counts[symbol]) for symbol in counts.nonzero()[0]} == {2: 2, 5: 2, 6: 1, 39: 1}
    with pytest.raises(UsageError, match="there is no 'dev'"):
        checkpoint.token_counts("dev")


def test_a_perplexity_reads_its_checkpoint_once(tmp_path: Path) -> None:
    lines = trained.random_lines(3, 12)
    data = trained.write_corpus(tmp_path, {"train": lines, "test": lines[:6]})
    sizes = [*trained.TINY, "--tokens-per-sample", "12"]
    path = trained.write_checkpoint(tmp_path / "model.pt", data, "vanilla_lm", *sizes)
    with patch.object(whole_files, "defect", wraps=whole_files.defect) as read:
        assert perplexity.evaluate(perplexity.load(str(path), cpu=True), "test").targets == 6 * 18
    read.assert_called_once_with(str(path))


def test_a_checkpoint_that_predicts_fewer_symbols_than_it_reads_is_refused(tmp_path: Path) -> None:
    data = trained.write_corpus(tmp_path / "data", {"train": trained.random_lines(3, 20)})
    flags = (*trained.TINY, "--output-dictionary-size", "9")
    path = trained.write_checkpoint(tmp_path / "model.pt", data, "vanilla_lm", *flags)
    with pytest.raises(UsageError, match=r"--output-dictionary-size 9 .*fairseq-eval-lm"):
        checkpoints.load(str(path), cpu=True)


def test_a_checkpoint_with_a_flag_that_is_gone_loads(tmp_path: Path) -> None:
    data = trained.write_corpus(tmp_path / "data", {"train": trained.random_lines(3, 20)})
    path = trained.write_checkpoint(tmp_path / "old" / "model.pt", data, "vanilla_lm", *trained.TINY)
    state = torch.load(path)
    state["cfg"]["model"]["compile_layers"] = True
    state["cfg"]["task"]["reset_memory"] = "corpus"
    state["cfg"]["criterion"]["log_q_blocks"] = 1000
    torch.save(state, path)
    # As fairseq-validate builds it.
    tasks.FairseqTask(None).build_criterion(checkpoint_utils.load_checkpoint_to_cpu(str(path))["cfg"].criterion)
    weights = trained.load(tmp_path, "old").model.state_dict()
    assert all(torch.equal(weights[name], state["model"][name]) for name in state["model"])
