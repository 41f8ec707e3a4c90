"""The analyses on models with a memory."""

import numpy as np
import pytest
import torch

from fairseq_ms.cli import main
from fairseq_ms.commands import context_window
from fairseq_ms.core.memory import Memory
from fairseq_ms.errors import UsageError
from fairseq_ms.papers import context_shuffle, neighbors
from fairseq_ms.tools import scoring, training_step
from tests.helpers.asked import STREAMING
from tests.helpers.trained import load


@pytest.mark.parametrize("arch", STREAMING)
def test_a_stream_is_scored_once_with_all_the_memory_it_has(models, arch):
    checkpoint = load(models, arch)
    assert checkpoint.streaming
    assert checkpoint.segment == 6
    (tokens,) = checkpoint.documents("test", limit=50)
    nll = scoring.score_documents(checkpoint, [tokens])
    source = torch.cat([tokens.new_tensor([checkpoint.dictionary.eos()]), tokens[:-1]])
    memory, expected = None, []
    for start in range(0, 50, 6):
        logits, extra = checkpoint.model(source[None, start : start + 6], memory=memory)
        memory = extra["memory"]
        log_probs = logits[0].log_softmax(-1)
        targets = tokens[start : start + 6]
        expected += (-log_probs[range(len(targets)), targets]).tolist()
    np.testing.assert_allclose(nll, expected, atol=2e-5)
    # The memory matters: without it, the second segment reads otherwise.
    alone = scoring.score_windows(checkpoint, source[None, 6:12], tokens[None, 6:12])[0].numpy()
    assert np.abs(alone - nll[6:12]).max() > 1e-4


@pytest.mark.parametrize("arch", STREAMING)
def test_context_tools_read_windows_from_an_empty_memory(models, arch):
    checkpoint = load(models, arch)
    tokens = checkpoint.text("test")
    targets = context_window.choose_targets(tokens.numel(), 13, 5)
    found = context_window.nll_with_context(checkpoint, tokens, targets, 13)
    for target, nll in zip(targets, found):
        logits = checkpoint.model(tokens[None, target - 13 : target])[0][0, -1]
        assert nll == pytest.approx(-logits.log_softmax(-1)[tokens[target]].item(), abs=2e-5)
    windows = context_shuffle.cut_windows(tokens, 24, None)
    _, raised = context_shuffle.increase_in_nll(checkpoint, windows, 12, "shuffle", seed=1)
    assert np.abs(raised[:, 0]).max() > 1e-4


def test_damage_beyond_segment_and_memory_is_never_felt(models):
    checkpoint = load(models, "transformer_xl")
    tokens = checkpoint.text("test")
    windows = context_shuffle.cut_windows(tokens, 40, None)
    _, raised = context_shuffle.increase_in_nll(checkpoint, windows, 12, "replace", seed=1)
    # A token sees 5 states of memory and at most 6 of its segment, in each of two layers.
    np.testing.assert_allclose(raised[:, 2 * (5 + 6) :], 0.0, atol=2e-6)
    assert np.abs(raised[:, :5]).max() > 1e-3


def test_a_training_step_is_measured_with_a_full_memory(models):
    checkpoint = load(models, "transformer_xl")
    sample = training_step.training_sample(checkpoint.model, 3, 6)
    memory = sample["net_input"]["memory"]
    assert isinstance(memory, Memory)
    assert memory.batch_size == 3
    lengths = {name: state.size(1) for name, state in memory.states.items()}
    assert lengths == checkpoint.model.decoder.core.memory_lengths()
    assert training_step.step_bytes(checkpoint.model, 3, 6) > 0


def test_streaming_models_say_what_they_cannot_answer(models, capsys):
    checkpoint = load(models, "transformer_xl")
    with pytest.raises(UsageError, match="transformer_xl, which does not"):
        neighbors.embed(checkpoint, torch.full((1, 6), 5))
    assert main(["nll-by-frequency", str(models / "transformer_xl/model.pt"), "--context-window", "3"]) == 2
    assert "transformer_xl reads the text once, got 3" in capsys.readouterr().err
    assert main(["nll-by-frequency", str(models / "transformer_xl/model.pt"), "--bins", "3"]) == 0
    assert main(["memory", "--path", str(models / "transformer_ql/model.pt")]) == 0
    assert "scales 1" in capsys.readouterr().out
