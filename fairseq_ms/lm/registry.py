"""Presets: named settings for ``--arch``, given as differences from a model's defaults."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, register_model_architecture

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {}
"""By ``--arch`` name: the model it belongs to and what it changes."""


def register_presets(model: str, table: Mapping[str, Mapping[str, Any]]) -> None:
    """Register ``<model>_<name>`` for every row of the table: a mapping from flags, with underscores, to values.

    A flag that the user gives wins over the preset's. fairseq skips presets under ``fairseq-hydra-train``; there
    the yaml files under ``user_dir_examples`` carry the same values.
    """
    known = {field.name for field in dataclasses.fields(MODEL_DATACLASS_REGISTRY[model])}
    for name, values in table.items():
        arch = f"{model}_{name}"
        unknown = values.keys() - known
        assert not unknown, (arch, unknown)
        assert arch not in ARCH_MODEL_REGISTRY, arch
        PRESETS[arch] = (model, dict(values))
        register_model_architecture(model, arch)(_preset(dict(values)))


def _preset(values: dict[str, Any]) -> Any:
    def fill_in(args: Namespace) -> None:
        for flag, value in values.items():
            if getattr(args, flag, None) is None:
                setattr(args, flag, value)

    return fill_in
