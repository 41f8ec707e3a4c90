"""Tensors of a model of somebody else's, and how ours are made of them; sizes are known before any is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_ms.core.scales import Scale
from fairseq_ms.errors import UsageError


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape, and what reads it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class Weights(Mapping[str, Tensor]):
    """The tensors of a source by name, read when they are asked for; UsageError for one that it does not have.

    Args:
        stored: by name
        shapes: only their shapes, as tensors without memory

    Attributes:
        asked: the names of those that have been asked for
    """

    def __init__(self, stored: Mapping[str, Stored], shapes: bool = False) -> None:
        self.stored, self.shapes, self.asked = stored, shapes, set[str]()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.stored:
            raise UsageError(f"SOURCE must have the weights that its configuration says: there is no {name}")
        self.asked.add(name)
        if self.shapes:
            return torch.empty(self.stored[name].shape, device="meta")
        tensor = self.stored[name].read()
        if not tensor.is_floating_point():
            raise UsageError(f"SOURCE must have weights of floating point: {name} is {tensor.dtype}")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


Tensors = Callable[[str, Weights], Tensor]
"""Makes the tensor of ours, by its name in a ``core.Vanilla``, of a source's."""


@dataclass(frozen=True)
class Names:
    """What a family of models calls the parts of our ``core.Vanilla``.

    Attributes:
        layer: what the names of layer {} begin with
        parts: of a layer: ours, and theirs, whose rows ours has one after the other
        others: ours and theirs, or what these begin with
        transposed: weights of projections in layers have the inputs first
    """

    layer: str
    parts: Mapping[str, tuple[str, ...]]
    others: Mapping[str, str]
    transposed: bool = False

    def tensor(self, name: str, weights: Weights) -> Tensor:
        """The tensor of ours by its name; a bias that a projection of theirs does not have is zero."""
        module, _, kind = name.rpartition(".")
        if match := re.fullmatch(r"stack\.layers\.(\d+)\.(.*)", module):
            places = [self.layer.format(match[1]) + part for part in self.parts[match[2]]]
            found = [self._of_layer(f"{place}.weight", kind, weights) for place in places]
            return torch.cat(found) if len(found) > 1 else found[0]
        ours = next(ours for ours in self.others if f"{module}.".startswith(f"{ours}."))
        return weights[f"{self.others[ours]}{module.removeprefix(ours)}.{kind}"]

    def _of_layer(self, weight: str, kind: str, weights: Weights) -> Tensor:
        other = weight.removesuffix("weight") + kind
        if kind == "bias" and other not in weights and (found := weights[weight]).dim() == 2:
            return found.new_zeros(found.size(int(self.transposed)))
        found = weights[other]
        return found.t() if self.transposed and found.dim() == 2 else found

    def layers_of(self, names: Iterable[str]) -> int:
        """How many layers there are weights of."""
        begin, end = map(re.escape, self.layer.split("{}"))
        found = (re.match(rf"{begin}(\d+){end}", name) for name in names)
        return len({match[1] for match in found if match})


def through_windows(tensor: Tensors, turns: list[list[Scale]], kv_heads: int, head_dim: int) -> Tensors:
    """The tensors of a ``core.Retina`` by their names in it, of those of a ``core.Vanilla``.

    Heads keep their order; keys and values of coarse scales are projected from pooled inputs by the rows that they had.

    Args:
        turns: the windows of one layer after the other, with their heads
        kv_heads: of keys and values, K
    """

    def retina(name: str, weights: Weights) -> Tensor:
        match = re.fullmatch(r"layers\.(\d+)\.attention\.(fine|coarse\.(\d+))\.(\w+)", name)
        if match is None:
            return tensor(f"stack.{name}" if name.startswith(("layers.", "norm.")) else name, weights)
        scales = turns[int(match[1]) % len(turns)]
        factors = list(dict.fromkeys(scale.factor for scale in scales))
        factor = factors[int(match[3]) + 1] if match[3] else 1
        all_O = tensor(f"stack.layers.{match[1]}.attention.qkv.{match[4]}", weights)
        heads, inner = sum(scale.heads for scale in scales), kv_heads * head_dim
        of_head = [scale.factor == factor for scale in scales for _ in range(scale.heads * kv_heads // heads)]
        index = torch.tensor(of_head).repeat_interleave(head_dim).nonzero().squeeze(1).to(all_O.device)
        queries, keys, values = all_O.split([len(all_O) - 2 * inner, inner, inner])
        return torch.cat([*([queries] if factor == 1 else []), keys[index], values[index]])

    return retina


def made(expected: Mapping[str, Tensor], stored: Mapping[str, Stored], tensor: Tensors, idle: str) -> dict[str, Tensor]:
    """All tensors of a model, once their shapes are known to fit.

    Args:
        expected: by name, tensors of the same shapes
        idle: a pattern of names that hold nothing of the model

    Raises UsageError for weights that are missing, left over, or of other sizes.
    """
    shapes = Weights(stored, shapes=True)
    for name, wanted in expected.items():
        try:
            found = tensor(name, shapes).shape
        except UsageError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            raise UsageError(f"SOURCE must have weights of one configuration: {name} cannot be made of them") from error
        if found != wanted.shape:
            rule = "SOURCE must have weights of the sizes that its configuration says"
            raise UsageError(f"{rule}: {name} would be {tuple(found)} and must be {tuple(wanted.shape)}")
    if left := sorted(name for name in stored.keys() - shapes.asked if not re.search(idle, name)):
        raise UsageError(f"SOURCE must have no weights that a model here has not: got {left[0]}")
    weights = Weights(stored)
    return {name: tensor(name, weights).contiguous() for name in expected}


def number(what: str, value: Any, least: int = 1) -> int:
    """A whole number of a configuration; UsageError for anything else, and one below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} must be a whole number of at least {least}: got {value!r}")
    return value
