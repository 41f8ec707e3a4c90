"""Flags that take one word of a few and that several models have, as the types of fields in their configurations."""

from typing import TYPE_CHECKING

from fairseq.dataclass import ChoiceEnum

from fairseq_ms.core.ops.linear import ACTIVATIONS
from fairseq_ms.core.pooling import DOWNSAMPLERS
from fairseq_ms.core.positions import POSITIONS

if TYPE_CHECKING:
    # fairseq makes these types when it is called. Their members equal their words, and to mypy they are the words.
    Activation = str
    Downsampler = str
    Positions = str
    Recompute = str
else:
    Activation = ChoiceEnum(list(ACTIVATIONS))
    Downsampler = ChoiceEnum(list(DOWNSAMPLERS))
    Positions = ChoiceEnum(list(POSITIONS))
    Recompute = ChoiceEnum(["pointwise", "none"])
