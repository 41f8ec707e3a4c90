"""Presets: named settings for ``--arch`` and, with a recipe for training, for ``fairseq-hydra-train``."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Values = Mapping[str, object]
"""Settings by their names, as yaml can hold them: flags of a model, with underscores, or a section of hydra's."""

Settings = Mapping[str, Values]
"""Hydra's settings by section: ``{"optimization": {"max_update": 1000}}``."""


@dataclass(frozen=True)
class Recipe:
    """How a paper trains its models.

    Attributes:
        source: where the paper says so
        settings: fairseq's settings by section; those under "model" are for a file, not for ``--arch``, and a number of
            updates that is "???" is one epoch of the data
        notes: what whoever runs it should know
        half: of the training data, "first" or "second"; "" for all of it
    """

    source: str
    settings: Settings
    notes: str = ""
    half: str = ""


@dataclass(frozen=True)
class Preset:
    """One row of a paper's tables.

    Attributes:
        name: what ``--arch`` and ``fairseq-ms config`` call it
        model: the architecture it belongs to
        table: where the paper reports it
        values: what it changes of the model's defaults, by flag, with underscores
        recipe: how it is trained
    """

    name: str
    model: str
    table: str
    values: Values
    recipe: Recipe


PRESETS: dict[str, Preset] = {}
"""What ``--arch`` takes, by name."""

CONFIGS: dict[str, Preset] = {}
"""What ``fairseq-ms config`` takes, by name: all presets, and runs of one that its name does not tell apart."""


def register_presets(rows: Iterable[Preset]) -> None:
    """List rows that ``--arch`` and ``fairseq-ms config`` name; a flag that the user gives wins over the preset's."""
    rows = list(rows)
    register_configs(rows)
    PRESETS.update({row.name: row for row in rows})


def register_configs(rows: Iterable[Preset]) -> None:
    """List rows that ``fairseq-ms config`` alone names."""
    for row in rows:
        assert row.name not in CONFIGS, row.name
        CONFIGS[row.name] = row


@functools.cache
def register_with_fairseq() -> None:
    """Let ``--arch`` name all presets that are listed, whose models must be registered."""
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, register_model_architecture

    for row in CONFIGS.values():
        unknown = row.values.keys() - MODEL_DATACLASS_REGISTRY[row.model].__dataclass_fields__.keys()
        assert not unknown, (row.name, unknown)
    for row in PRESETS.values():
        assert row.name not in ARCH_MODEL_REGISTRY, row.name
        register_model_architecture(row.model, row.name)(functools.partial(_fill_in, row.values))


def _fill_in(values: Values, args: Namespace) -> None:
    for flag, value in values.items():
        if getattr(args, flag, None) is None:
            setattr(args, flag, value)
