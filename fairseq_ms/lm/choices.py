"""Fields of configurations with their help and rules, and the types of flags that take one word of a few."""

# fairseq makes these types when it is called.
# mypy: disable-error-code="valid-type"

from dataclasses import field
from functools import partial
from typing import Any, TypeAlias

from fairseq.dataclass import ChoiceEnum

from fairseq_ms.core.config import DOWNSAMPLERS, POSITIONS, RESIDUAL_STARTS
from fairseq_ms.core.ops.linear import ACTIVATIONS, NORMS

Activation: TypeAlias = ChoiceEnum(list(ACTIVATIONS))
ChunkEncoder: TypeAlias = ChoiceEnum(["mlp", "lstm"])
Compression: TypeAlias = ChoiceEnum(["max", "avg"])
Downsampler: TypeAlias = ChoiceEnum(list(DOWNSAMPLERS))
Norm: TypeAlias = ChoiceEnum(list(NORMS))
Part: TypeAlias = ChoiceEnum(["transformer", "lstm"])
Positions: TypeAlias = ChoiceEnum(list(POSITIONS))
Recompute: TypeAlias = ChoiceEnum(["pointwise", "none"])
Query: TypeAlias = ChoiceEnum(["none", "linear"])
ResidualStart: TypeAlias = ChoiceEnum(list(RESIDUAL_STARTS))
Segmentation: TypeAlias = ChoiceEnum(["words", "fixed"])
WindowOverlap: TypeAlias = ChoiceEnum(["forbid", "allow"])


def option(default: Any, help: str, **rules: Any) -> Any:
    """A field of a configuration: the default of its flag, its help, and its rules.

    The rules are ``least``, ``above`` and ``below``, the bounds of its values, and ``needs``, the flags without any of
    which it has no effect: ``"adaptive_input"`` or, with a value, ``"positions rotary"``.
    """
    return field(default=default, metadata={"help": help, **rules})


probability = partial(option, least=0, below=1)
