"""Every registered architecture with small random configurations of it, for tests that hold for all."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY

from fairseq_ms.lm.base import BaseLanguageModel

POSITIONS = 64


ARCHITECTURES = sorted(
    name
    for name, model in MODEL_REGISTRY.items()
    if issubclass(model, BaseLanguageModel) and model.__module__.startswith("fairseq_ms.")
)


def by_family(archs: Iterable[str]) -> list[Any]:
    """``archs`` for ``parametrize``; `make test` takes one of each family."""
    families = ("retina_lm", "transformer_xl", "haed")
    return [arch if arch in families else pytest.param(arch, marks=pytest.mark.slow) for arch in archs]


def config_module(arch: str) -> ModuleType:
    """``tests/configs/<arch>.py``."""
    return importlib.import_module(f"tests.configs.{arch}")


def setting(arch: str, name: str, default: Any) -> Any:
    """What the architecture's configuration module says, or the default."""
    return getattr(config_module(arch), name, default)


GENERATORS = [arch for arch in ARCHITECTURES if setting(arch, "GENERATES", True)]


def dictionary(symbols: int) -> Dictionary:
    """fairseq's four special symbols and ``symbols`` more."""
    words = Dictionary()
    for index in range(symbols):
        words.add_symbol(f"word{index}")
    return words


@dataclass(frozen=True)
class Case:
    """A model with random weights, in evaluation mode, and what its tests need to know."""

    arch: str
    flags: dict[str, Any]
    model: BaseLanguageModel
    dictionary: Dictionary
    rng: random.Random

    def lengths(self) -> int:
        """A random sequence length."""
        shortest, longest = setting(self.arch, "LENGTHS", (1, 24))
        return self.rng.randint(shortest, longest)

    def tokens(self, rows: int, length: int) -> torch.Tensor:
        """Random tokens (rows, length), without padding."""
        return torch.randint(self.dictionary.nspecial, len(self.dictionary), (rows, length))

    def with_another_future(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Two random batches that are the same up to a position, which is the third result."""
        length = max(2, self.lengths())
        tokens, changed, at = self.tokens(rows, length), self.tokens(rows, length), self.rng.randrange(1, length)
        changed[:, :at] = tokens[:, :at]
        # Another token, never the same one: a step of 1 .. n - 1 within the n ordinary symbols.
        first, ordinary = self.dictionary.nspecial, len(self.dictionary) - self.dictionary.nspecial
        changed[:, at] = (tokens[:, at] - first + self.rng.randrange(1, ordinary)) % ordinary + first
        return tokens, changed, at


def build(
    arch: str, flags: dict[str, Any], words: Dictionary, positions: int = POSITIONS, from_checkpoint: bool = False
) -> BaseLanguageModel:
    """A model of these flags, through fairseq's own ``build_model`` of the registered class."""
    cfg = MODEL_DATACLASS_REGISTRY[arch]()
    known = {"tokens_per_sample": positions, "max_target_positions": None, "add_bos_token": False, **flags}
    for name, value in known.items():
        assert hasattr(cfg, name), f"{arch} has no flag {name}"
        setattr(cfg, name, value)
    task = SimpleNamespace(
        source_dictionary=words, target_dictionary=words, args=SimpleNamespace(**known), from_checkpoint=from_checkpoint
    )
    return MODEL_REGISTRY[arch].build_model(cfg, task)


def random_case(arch: str, seed: int, symbols: int = 9, std: float = 0.4) -> Case:
    """The ``seed``-th configuration, with weights large enough for every path to matter.

    Deep architectures set an ``init_std`` of their own, with which projections keep magnitudes as they are.
    """
    rng = random.Random(f"{arch} {seed}")
    words = dictionary(symbols)
    flags = config_module(arch).random_flags(rng)
    torch.manual_seed(seed)
    model = build(arch, {"init_std": std, **flags}, words).eval()
    for name, parameter in model.named_parameters():
        # Gates start closed, and gains of queries and keys at 1, where they are the same turned or not.
        if name.endswith(".gate") or ".qk." in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif ".short_conv." in name:
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    return Case(arch, flags, model, words, rng)


def exact_case(arch: str, seed: int) -> Case:
    """A random case in float64: in float32 it depends on the CPU whether two orders of summation agree to 1e-5."""
    case = random_case(arch, seed)
    case.model.double()
    return case


def trained_case(arch: str, seed: int) -> Case:
    """A random case in training mode, with dropout wherever it has a flag."""
    case, config = random_case(arch, seed), MODEL_DATACLASS_REGISTRY[arch]
    dropped = [flag for flag in ("dropout", "attention_dropout", "activation_dropout") if hasattr(config, flag)]
    torch.manual_seed(seed)
    model = build(arch, {"init_std": 0.4, **case.flags, **dict.fromkeys(dropped, 0.1)}, case.dictionary)
    return replace(case, model=model.train())
