"""Configurations as fairseq-hydra-train reads them, in this process."""

import argparse
from typing import Any

import torch
from fairseq import criterions, optim
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults
from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.optim import lr_scheduler
from fairseq.optim.fp16_optimizer import FP16Optimizer
from omegaconf import OmegaConf

from fairseq_ms.commands.config import config_text
from fairseq_ms.optim import of_torch
from fairseq_ms.presets.registry import CONFIGS, PRESETS
from fairseq_ms.tools import untrained
from tests.registry import dictionary

OF_PAPERS = {name: preset for name, preset in CONFIGS.items() if preset.recipe.source.endswith('"')}
"""The presets and runs of the papers, without those of docs/models.md."""


def composed(written: Any) -> Any:
    """What fairseq-hydra-train makes of the settings in a file."""
    cfg = OmegaConf.merge(OmegaConf.structured(FairseqConfig), written)
    # What "???" leaves is fairseq's default, none, without which there is no schedule.
    cfg.optimization.max_update = cfg.optimization.max_update or 3000
    add_defaults(cfg)
    return cfg


def by_hydra(name: str) -> Any:
    """What fairseq-hydra-train makes of what ``fairseq-ms config`` writes."""
    return composed(OmegaConf.create(config_text(CONFIGS[name])))


def by_arch(arch: str) -> Any:
    """The model's configuration that ``--arch`` gives, as fairseq fills it in."""
    dataclass = MODEL_DATACLASS_REGISTRY[PRESETS[arch].model]
    args = argparse.Namespace(arch=arch, **dict.fromkeys(dataclass.__dataclass_fields__))
    ARCH_CONFIG_REGISTRY[arch](args)
    cfg = dataclass()
    for name, value in vars(args).items():
        if value is not None and name != "arch":
            setattr(cfg, name, value)
    return cfg


class _Words(list):
    def pad(self) -> int:
        return 1


def parameters(model: str, cfg: Any, symbols: int) -> int:
    """How many the model of a configuration from ``by_arch`` has; its weights take no memory."""
    words, args = _Words(["w"] * symbols), argparse.Namespace(tokens_per_sample=cfg.tokens_per_sample)
    cfg.max_target_positions, cfg.add_bos_token = None, False
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words, args=args)
    with torch.device("meta"):
        built = MODEL_REGISTRY[model].build_model(cfg, task)
    return sum(parameter.numel() for parameter in built.parameters())


def assert_the_file_carries_the_values_of(arch: str) -> None:
    """What ``fairseq-ms config`` writes gives the model the same settings as ``--arch``, but for one."""
    cfg, expected = by_hydra(arch), OmegaConf.structured(by_arch(arch))
    assert cfg.model._name == PRESETS[arch].model
    # The rest comes from the task and the criterion.
    elsewhere = ("_name", "tokens_per_sample", "max_target_positions", "add_bos_token", "criterion")
    # tests/presets/test_recipes.py has what the files of tiny models alone say.
    own = ("decoder_normalize_after",) if arch.endswith("_tiny") else ()
    for name in set(expected) - {*elsewhere, *own}:
        # What depends on the kinds of its parts has no default, and the file spells it out.
        assert expected[name] is None or cfg.model[name] == expected[name], name


def build_everything(cfg: Any, symbols: int) -> None:
    """Model, criterion, optimizer and schedule of a composed configuration; weights take no memory."""
    cfg.task.data = "unread"
    if OmegaConf.is_missing(cfg.checkpoint, "finetune_from_model"):
        cfg.checkpoint.finetune_from_model = "unread"
    OmegaConf.resolve(cfg)
    model = untrained.build_model(cfg, symbols, device="meta")
    task = argparse.Namespace(target_dictionary=dictionary(300), source_dictionary=None)
    assert isinstance(criterions.build_criterion(cfg.criterion, task), torch.nn.Module)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if cfg.optimizer._name == "muon":
        of_torch.prepare_muon(cfg, model)
    optimizer = optim.build_optimizer(cfg.optimizer, parameters)
    if cfg.optimizer._name == "composite":
        FP16Optimizer.build_optimizer(cfg, parameters)
    lr_scheduler.build_lr_scheduler(cfg.lr_scheduler, optimizer)
