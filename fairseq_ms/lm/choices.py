"""Fields of configurations: a default with its help, and the types of flags that take one word of a few."""

from dataclasses import field
from typing import TYPE_CHECKING, Any

from fairseq.dataclass import ChoiceEnum

from fairseq_ms.core.layers import DOWNSAMPLERS, POSITIONS, RESIDUAL_STARTS
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


def option(default: Any, help: str) -> Any:
    """A field of a configuration, with the help of its flag."""
    return field(default=default, metadata={"help": help})
