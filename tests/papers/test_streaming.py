"""The papers' analyses on models with a memory."""

import numpy as np

from fairseq_ms.cli import main
from fairseq_ms.papers import context_shuffle
from tests.helpers.trained import load


def test_damage_beyond_segment_and_memory_is_never_felt(models):
    checkpoint = load(models, "transformer_xl")
    tokens = checkpoint.text("test")
    windows = context_shuffle.cut_windows(tokens, 40, None)
    _, raised = context_shuffle.increase_in_nll(checkpoint, windows, 12, "replace", seed=1)
    # A token sees 5 states of memory and at most 6 of its segment, in each of two layers.
    np.testing.assert_allclose(raised[:, 2 * (5 + 6) :], 0.0, atol=2e-6)
    assert np.abs(raised[:, :5]).max() > 1e-3


def test_a_memory_is_read_with_the_text_and_counted(models, capsys):
    assert main(["nll-by-frequency", str(models / "transformer_xl/model.pt"), "--bins", "3"]) == 0
    assert main(["memory", "--path", str(models / "transformer_ql/model.pt")]) == 0
    assert "scales 1" in capsys.readouterr().out
