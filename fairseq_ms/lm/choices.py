"""Fields of configurations with their help and rules, and the types of flags that take one word of a few."""

from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any

from fairseq.dataclass import ChoiceEnum

from fairseq_ms.core.config import DOWNSAMPLERS, POSITIONS, RESIDUAL_STARTS
from fairseq_ms.core.ops.linear import ACTIVATIONS, NORMS

if TYPE_CHECKING:
    # fairseq makes these types when it is called. Their members equal their words, and to mypy they are the words.
    Activation = str
    ChunkEncoder = str
    Compression = str
    Downsampler = str
    Norm = str
    Part = str
    Positions = str
    Recompute = str
    Query = str
    ResidualStart = str
    Segmentation = str
    WindowOverlap = str
else:
    Activation = ChoiceEnum(list(ACTIVATIONS))
    ChunkEncoder = ChoiceEnum(["mlp", "lstm"])
    Compression = ChoiceEnum(["max", "avg"])
    Downsampler = ChoiceEnum(list(DOWNSAMPLERS))
    Norm = ChoiceEnum(list(NORMS))
    Part = ChoiceEnum(["transformer", "lstm"])
    Positions = ChoiceEnum(list(POSITIONS))
    Recompute = ChoiceEnum(["pointwise", "none"])
    Query = ChoiceEnum(["none", "linear"])
    ResidualStart = ChoiceEnum(list(RESIDUAL_STARTS))
    Segmentation = ChoiceEnum(["words", "fixed"])
    WindowOverlap = ChoiceEnum(["forbid", "allow"])


def option(default: Any, help: str, **rules: Any) -> Any:
    """A field of a configuration: the default of its flag, its help, and its rules.

    The rules are ``least``, ``above`` and ``below``, the bounds of its values, and ``needs``, the flags without any of
    which it has no effect: ``"adaptive_input"`` or, with a value, ``"positions rotary"``.
    """
    return field(default=default, metadata={"help": help, **rules})


probability = partial(option, least=0, below=1)
