"""Scores and training steps of models with a memory."""

import numpy as np
import pytest
import torch

from fairseq_ms.core.stream_state import Memory
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


def test_a_training_step_is_measured_with_a_full_memory(models):
    checkpoint = load(models, "transformer_xl")
    sample = training_step.training_sample(checkpoint.model, 3, 6)
    memory = sample["net_input"]["memory"]
    assert isinstance(memory, Memory)
    assert memory.batch_size == 3
    lengths = {name: state.size(1) for name, state in memory.states.items()}
    assert lengths == checkpoint.model.decoder.core.memory_lengths()
    assert training_step.step_bytes(checkpoint.model, 3, 6) > 0
