"""What makes generation fast on a GPU: steps that it replays as CUDA graphs.

The operations of such a step are the same at every token: ``buffers.py`` has caches of fixed shapes, ``states.py``,
``streams.py`` and ``chunks.py`` the models' states made of them, ``replay.py`` the steps. All of this knows the models,
and no model knows it: importing it has their ``generate`` read by a ``Reader``.
"""

from fairseq_ms.core.model import CausalModel
from fairseq_ms.core.steps.replay import Reader, Steps, has_steps, takes_graphs

CausalModel.reader = Reader

__all__ = ["Reader", "Steps", "has_steps", "takes_graphs"]
