"""The two phases of haed, as a user runs them."""

import json
import re
from pathlib import Path

import pytest
import torch

from fairseq_ms import cli
from fairseq_ms.errors import UsageError
from tests.helpers.cli import USER_DIR
from tests.helpers.corpus import write_corpus
from tests.helpers.forked import train
from tests.registry import build, dictionary

SMALL = {
    "encoder_units": 9,
    "decoder_embed_dim": 16,
    "position_embed_dim": 6,
    "decoder_layers": 1,
    "decoder_ffn_embed_dim": 24,
    "decoder_attention_heads": 2,
    "attention_head_dim": 4,
    "decoder_units": 12,
    "separators": "word0",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("chunks"))


def hydra_train(config: str, data: Path, save: Path, *overrides: str) -> dict[int, dict[str, str]]:
    """Train a small model with one of the paper's runs; what was logged, by update."""
    assert cli.main(["config", config, "--out", str(save / "configs" / f"{config}.yaml")]) == 0
    small = [f"++model.{name}={value}" for name, value in SMALL.items()]
    command = (
        *("fairseq-hydra-train", "--config-dir", save / "configs", "--config-name", config),
        *small,
        *overrides,
        *(f"task.data={data}", "task.tokens_per_sample=24", f"common.user_dir={USER_DIR}", "common.cpu=true"),
        *("common.log_format=json", "common.log_interval=1", "dataset.batch_size=4", "dataset.num_workers=0"),
        *(f"checkpoint.save_dir={save}", f"hydra.run.dir={save}/hydra"),
    )
    train(command, save / "log.txt")
    log = (save / "log.txt").read_text()
    records = [json.loads(line) for line in re.findall(r"\[train_inner\]\[INFO\] - (\{.*\})", log)]
    return {int(record["num_updates"]): record for record in records}


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


def warmup(updates: int, *groups: str) -> list[str]:
    return [f"optimizer.groups.{group}.lr_scheduler.warmup_updates={updates}" for group in groups]


def test_both_phases_train_all_their_parts_at_their_own_rates(data: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "iem", tmp_path / "finetune"
    logged = hydra_train("characters_iem", data, first, "optimization.max_update=12", *warmup(2, "encoder", "main"))
    last = logged[11]
    assert {"lr_encoder", "lr_main"} == {name for name in last if name.startswith("lr_")}
    assert 0.0 <= float(last["top1"]) <= float(last["top5"]) <= 100.0
    assert float(last["negatives"]) > 20.0
    assert {name.split(".")[0] for name in saved(first)} == {"encoder", "main"}

    hydra_train(
        *("characters_finetune", data, second, "optimization.max_update=4"),
        *(f"checkpoint.finetune_from_model={first}/checkpoint_last.pt", "optimization.clip_norm=1.0"),
        *warmup(1, "encoder", "main", "decoder"),
    )
    log = (second / "log.txt").read_text()
    assert re.search(r"from the first phase: encoder \(5 tensors\), main .* loaded; new: ", log)
    assert re.search(r"new: chunk_decoder.embed \(1 tensors\), chunk_decoder.lstm .*, project", log)
    before, after = saved(first), saved(second)
    moved: dict[str, float] = {}
    for name, value in before.items():
        if not name.startswith("query."):
            change = float((after[f"decoder.core.{name}"] - value).abs().max())
            # Adam moves no weight by much more than the learning rate an update.
            assert change < 4 * 0.002 * 1.5, f"{name} did not come from the first phase"
            moved[name.split(".")[0]] = max(change, moved.get(name.split(".")[0], 0.0))
    assert min(moved.values()) > 0.0
    assert moved["main"] < moved["encoder"], "the main model has the lower rate"


@pytest.mark.parametrize("query", ["none", "linear"])
def test_the_encoder_and_the_main_model_of_the_first_phase_are_taken_over_exactly(query: str, caplog) -> None:
    flags = {**SMALL, "criterion": "cross_entropy"}
    first = build("haed", {**flags, "criterion": "in_batch_sampled_softmax", "query": query}, dictionary(4))
    model = build("haed", flags, dictionary(4))
    decoder = {
        name: value.clone()
        for name, value in model.state_dict().items()
        if not name.startswith(("decoder.core.encoder.", "decoder.core.main."))
    }
    with caplog.at_level("INFO"):
        model.load_state_dict(first.state_dict(), strict=True)
    for name, value in first.state_dict().items():
        if not name.startswith("query."):
            assert torch.equal(model.state_dict()[f"decoder.core.{name}"], value)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in decoder.items())
    dropped = {"none": "nothing", "linear": "query.weight (1 tensors), query.bias (1 tensors)"}[query]
    assert f"not needed any more: {dropped}" in caplog.text
    with pytest.raises(UsageError, match=r"^--path must be a model with a decoder: this one was trained with --crit"):
        first.prepare_for_inference_(None)
    # A checkpoint of the second phase is loaded as it is.
    again = build("haed", flags, dictionary(4))
    again.load_state_dict(model.state_dict(), strict=True)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
