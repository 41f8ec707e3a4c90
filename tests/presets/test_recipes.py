"""Presets of docs/models.md: their sizes, and that each learns by the file that is written for it."""

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.logging import metrics
from omegaconf import OmegaConf

from fairseq_ms.commands import config
from fairseq_ms.core.scales import share_heads
from fairseq_ms.host.trainer import Trainer
from fairseq_ms.lm.scales import window_scales
from fairseq_ms.presets.registry import PRESETS
from tests.helpers.hydra import by_arch, by_hydra, parameters
from tests.helpers.trained import random_lines, write_corpus
from tests.registry import build, dictionary

MODELS = ("vanilla_lm", "retina_lm", "multiscale_topdown", "multiscale_bottomup", "transformer_ql", "haed")
TINY = [f"{model}_tiny" for model in MODELS[:4]]
LONG = [
    f"{model}_{length}"
    for length in (2048, 8192)
    for model in ("retina_lm_long", "vanilla_lm_long", "vanilla_lm_window")
]
NAMES = LONG + TINY + [f"{model}_{size}" for size in ("small", "base") for model in MODELS]
SYMBOLS = {"tiny": 8_000, "small": 8_000, "base": 32_000}
LIMITS = {"tiny": (2e6, 4.4e6), "small": (8.8e6, 14.4e6), "base": (93e6, 110e6)}
# Twins have the same parameters.
LIMITS |= {"2048": (2.1e6, 2.2e6), "8192": (29.2e6, 29.4e6)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    return write_corpus(folder / "bin", {"train": random_lines(1, 100), "valid": random_lines(2, 9)})


def test_every_recipe_of_a_size_is_a_preset() -> None:
    assert [name for name, preset in PRESETS.items() if preset.recipe.source.endswith("docs/models.md")] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_the_size_that_its_name_says(name: str) -> None:
    preset, size = PRESETS[name], name.rpartition("_")[2]
    if preset.model == "haed":
        with torch.device("meta"):
            built = build("haed", {**preset.recipe.settings["model"], **preset.values}, dictionary(200), positions=12)
        found = sum(parameter.numel() for parameter in built.parameters())
    else:
        cfg = by_arch(name)
        cfg.tokens_per_sample = preset.values.get("tokens_per_sample", 512)
        found = parameters(preset.model, cfg, SYMBOLS.get(size, 8_000))
    least, most = LIMITS[size]
    assert least < found < most


def test_a_file_says_what_has_been_tested_and_what_train_sets() -> None:
    texts = [name for name in NAMES if not name.startswith(("transformer_ql", "haed"))]
    said = {name: PRESETS[name].recipe.notes for name in texts}
    untested = {name for name, notes in said.items() if "untested at this size" in notes}
    assert untested == {name for name in texts if name.endswith(("_small", "_base", "_8192"))}
    for notes in said.values():
        assert f"above {config._MANY_PASSES} passes over DATA, model.dropout is {config._DROPOUT}" in notes


@pytest.mark.parametrize("length", [2048, 8192])
def test_a_retina_for_long_texts_remembers_as_much_as_the_window_beside_it(length: int) -> None:
    keys = []
    for model in ("retina_lm_long", "vanilla_lm_window"):
        cfg = by_arch(f"{model}_{length}")
        scales = share_heads(window_scales(cfg.scale_windows)[0], cfg.decoder_attention_heads)
        keys.append(sum(scale.heads * scale.most_blocks(length) for scale in scales) / cfg.decoder_attention_heads)
    assert keys[0] == pytest.approx(keys[1], rel=0.03)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_base")])
def test_a_recipe_learns_by_the_file_that_is_written_for_it(name: str, data: Path) -> None:
    cfg: Any = by_hydra(name)
    OmegaConf.set_struct(cfg, False)
    cfg.task.data, cfg.common.cpu, cfg.dataset.num_workers = str(data), True, 0
    cfg.dataset.batch_size = 1
    if cfg.task._name == "language_modeling":
        cfg.task.tokens_per_sample = 128
    OmegaConf.resolve(cfg)
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    batches = trainer.get_train_iterator(1).next_epoch_itr(shuffle=False)
    losses = []
    for sample in [next(iter(islice(batches, 1)))] * 4:
        with metrics.aggregate(new_root=True) as meters:
            trainer.train_step([sample])
        losses.append(float(meters["loss"].avg))
    assert losses[-1] < losses[0]
    # After few layers, tied embeddings first predict the token that they read, by a logit of 0.1 * 128 nats.
    if not name.endswith(("_tiny", "_2048")):
        assert losses[0] == pytest.approx(math.log2(len(task.source_dictionary)), abs=2.5)
