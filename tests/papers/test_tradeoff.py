"""tradeoff: perplexity and cost of every run below a folder."""

import json
import math
from functools import partial
from types import SimpleNamespace

import pytest

from fairseq_ms.cli import main
from fairseq_ms.papers.tradeoff import layers_of
from fairseq_ms.tools import checkpoints, scoring, training_step
from fairseq_ms.tools.saved_bytes import saved_bytes
from tests.helpers.trained import NARROW, random_lines, write_checkpoint, write_corpus


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tradeoff")
    data = write_corpus(folder / "bin", {"train": random_lines(1, 40), "test": random_lines(2, 9)})
    size = [*NARROW, "--tokens-per-sample", "64"]
    for layers in (1, 3):
        path = folder / f"runs/vanilla/{layers}/checkpoint_best.pt"
        write_checkpoint(path, data, "vanilla_lm", *size, "--decoder-layers", str(layers))
    scales = ["--scale-layers", "1x=1,16x=3,4x=2"]
    write_checkpoint(folder / "runs/topdown/checkpoint_best.pt", data, "multiscale_topdown", *size, *scales)
    return folder / "runs"


def test_every_run_has_the_perplexity_of_its_scores_and_the_memory_of_its_step(runs, tmp_path, capsys):
    files = ["--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]
    assert main(["tradeoff", str(runs), "--batch-size", "3", *files]) == 0
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {run["label"]: run["layers"] for run in results} == {"topdown": "3,2,1", "vanilla/1": "1", "vanilla/3": "3"}
    for run in results:
        checkpoint = checkpoints.load(str(runs / run["label"] / "checkpoint_best.pt"))
        nll = scoring.score_documents(checkpoint, checkpoint.documents("test")).mean()
        assert run["perplexity"] == pytest.approx(math.exp(nll))
        model = checkpoint.model.train()
        sample = training_step.training_sample(model, 3, 64)
        assert run["kept_bytes"] == saved_bytes(partial(training_step.training_loss, model, sample), model)
        parameters = sum(parameter.numel() for parameter in checkpoint.model.parameters())
        assert run["total_bytes"] == run["kept_bytes"] + 16 * parameters
        assert run["kept_bytes_per_target"] == run["kept_bytes"] / (3 * 64)
        assert run["seconds"] > 0
        assert run["max_memory_allocated"] is None
    assert (tmp_path / "out.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    assert "multiscale_topdown" in printed
    assert "GB: kept for backward, weights, gradients and Adam" in printed


def test_layers_are_written_coarsest_scale_first():
    assert layers_of(SimpleNamespace(scale_layers="1x=8, 64x=2,4x=7")) == "2,7,8"
    assert layers_of(SimpleNamespace(decoder_layers=12)) == "12"
