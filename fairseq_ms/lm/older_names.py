"""What checkpoints of 0.2 and after it called their tensors: the only place that knows, beside HAED's two phases."""

from __future__ import annotations

import re
from typing import Any

import torch

from fairseq_ms import core
from fairseq_ms.core.stream_state import SavedMemory

# In the order of history: of which models, what a name matches, and what stands there today; None for a tensor that
# has no successor.
TABLE: tuple[tuple[type[core.CausalModel], str, str | None], ...] = (
    # Before models of the core had a name of their own.
    (core.CausalModel, r"^decoder\.(?!core\.)", "decoder.core."),
    # Before the coarse model was a scale of the top-down one.
    (core.CoarseLM, r"^decoder\.core\.(?=(pool|norm|stack)\.)", "decoder.core.scale."),
    # Buffers of fairseq's adaptive input and softmax, which held no weights.
    (core.CausalModel, r"^decoder\.core\.(embed\.words|adaptive_softmax)(\.head)?\.(_float_tensor|version)$", None),
)


def bring_to_today(state_dict: dict[str, Any], kind: type[core.CausalModel]) -> None:
    """Rename the tensors of a checkpoint of this class of models, in place; those of today stay as they are."""
    for model, pattern, today in TABLE:
        for name in [name for name in state_dict if issubclass(kind, model) and re.search(pattern, name)]:
            value = state_dict.pop(name)
            if today is not None:
                state_dict[re.sub(pattern, today, name)] = value


def memory_of_today(saved: SavedMemory) -> SavedMemory:
    """A memory in a checkpoint, where the compressed part of a layer's had a name of its own."""
    states = dict(saved["states"])
    for name in [name for name in states if name.startswith("compressed")]:
        layer = name.replace("compressed", "layer")
        states[layer] = torch.cat([states.pop(name), states[layer]], dim=1)
    return {"states": states, "pending": saved["pending"]}
