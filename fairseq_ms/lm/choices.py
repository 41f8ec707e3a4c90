"""Flags that take one word of a few and that several models have, as the types of fields in their configurations."""

from typing import TYPE_CHECKING

from fairseq.dataclass import ChoiceEnum

from fairseq_ms.core.layers import DOWNSAMPLERS, POSITIONS, RESIDUAL_STARTS
from fairseq_ms.core.ops.linear import ACTIVATIONS, NORMS

if TYPE_CHECKING:
    # fairseq makes these types when it is called. Their members equal their words, and to mypy they are the words.
    Activation = str
    Downsampler = str
    Norm = str
    Positions = str
    Recompute = str
    ResidualStart = str
else:
    Activation = ChoiceEnum(list(ACTIVATIONS))
    Downsampler = ChoiceEnum(list(DOWNSAMPLERS))
    Norm = ChoiceEnum(list(NORMS))
    Positions = ChoiceEnum(list(POSITIONS))
    Recompute = ChoiceEnum(["pointwise", "none"])
    ResidualStart = ChoiceEnum(list(RESIDUAL_STARTS))
