"""What makes generation fast on a GPU: steps that it replays as CUDA graphs.

The operations of such a step are the same at every token: ``buffers.py`` has caches of fixed shapes, ``states.py``,
``streams.py`` and ``chunks.py`` the models' states made of them, ``replay.py`` the steps. All of this knows the models,
and of the models only ``generate`` knows it, which reads by a ``Reader``.
"""

from fairseq_ms.core.steps.replay import Reader, Steps, has_steps, takes_graphs

__all__ = ["Reader", "Steps", "has_steps", "takes_graphs"]
