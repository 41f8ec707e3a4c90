"""What makes generation fast on a GPU: steps that it replays as CUDA graphs.

The operations of such a step are the same at every token: ``buffers.py`` has caches of fixed shapes, ``states.py``,
``streams.py`` and ``chunks.py`` the models' states made of them, ``replay.py`` the steps.
All of this knows the models; no model knows it but ``CausalModel.generate``, which asks ``begin_steps_of`` whether
there is this way.
"""

from fairseq_ms.core.steps.replay import Steps, begin_steps_of, has_steps, takes_graphs

__all__ = ["Steps", "begin_steps_of", "has_steps", "takes_graphs"]
