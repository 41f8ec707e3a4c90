"""context-window, by single forward passes and on a model of known answers."""

import numpy as np
import pytest
from fairseq.models import FairseqLanguageModel

from fairseq_ms.cli import main
from fairseq_ms.commands import context_window
from tests.helpers.asked import STREAMING, answer
from tests.helpers.trained import TINY, load, random_lines, write_checkpoint, write_corpus


@pytest.mark.parametrize("arch", ["vanilla", *STREAMING])
def test_perplexity_with_little_context_equals_single_forward_passes_from_an_empty_memory(models, arch):
    checkpoint = load(models, arch)
    tokens = checkpoint.text("test")
    targets = context_window.choose_targets(tokens.numel(), 13, 9)
    assert targets[0] == 13
    assert targets[-1] == tokens.numel() - 1
    for length in (1, 5, 13):
        found = context_window.nll_with_context(checkpoint, tokens, targets, length, max_tokens=30)
        for target, nll in zip(targets, found):
            logits = checkpoint.model(tokens[None, target - length : target])[0][0, -1]
            assert nll == pytest.approx(-logits.log_softmax(-1)[tokens[target]].item(), abs=2e-5)


def test_a_model_of_two_windows_of_three_tokens_gains_nothing_past_five(models, tmp_path, capsys):
    # No position embedding changes: the model is given 5 or more tokens, so the last 5 are at other positions.
    def forget_positions(model: FairseqLanguageModel) -> None:
        model.decoder.core.embed.positions.weight.zero_()

    flags = [*TINY, "--tokens-per-sample", "32", "--scale-windows", "1x=0:3", "--init-std", "0.3"]
    path = write_checkpoint(tmp_path / "blind/model.pt", models / "bin", "vanilla_lm", *flags, change=forget_positions)
    (result,) = answer(tmp_path, "context-window", str(path), "--contexts", "1,2,5,9,32", "--limit", "50")["results"]
    nll = {point["context"]: point["nll"] for point in result["by_context"]}
    assert abs(nll[1] - nll[5]) > 1e-3
    assert nll[9] == pytest.approx(nll[5], abs=1e-6)
    assert nll[32] == pytest.approx(nll[5], abs=1e-6)
    assert "same 50 tokens" in capsys.readouterr().out


def test_checkpoints_of_other_dictionaries_are_not_compared(models, tmp_path, capsys):
    other = write_corpus(tmp_path / "bin", {"train": random_lines(9, 30, words=7), "test": random_lines(8, 9, words=7)})
    path = write_checkpoint(tmp_path / "other/model.pt", other, "vanilla_lm", *TINY, "--tokens-per-sample", "32")
    assert main(["context-window", str(models / "vanilla/model.pt"), str(path)]) == 2
    assert "the dictionaries of vanilla and other differ" in capsys.readouterr().err


def test_a_figure_without_matplotlib_says_what_to_install(models, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    assert main(["context-window", str(models / "vanilla/model.pt"), "--png", "x.png"]) == 2
    assert "--png needs the package matplotlib: run pip install matplotlib" in capsys.readouterr().err


def test_bands_of_context_hold_the_perplexity_and_close_at_the_longest():
    generator = np.random.default_rng(4)
    hard = generator.gamma(2.0, 2.0, 300)
    nll = np.stack([hard + generator.normal(0.5, 0.1, 300), hard])
    short, longest = np.transpose(context_window.perplexities(nll, seed=1))
    assert short[1] < short[0] < short[2]
    # The targets differ by several nats, the gain by a tenth: paired, it is known to 0.1 / sqrt(300).
    assert np.log(short[2] / short[1]) < 5 * 0.1 / np.sqrt(300)
    np.testing.assert_allclose(longest, np.exp(hard.mean()))
