"""Generation, on a GPU by CUDA graphs: each token is one replay of a captured decoding step.

A captured step runs the same operations on the same memory whenever it is replayed. ``generation.py`` is the loop over
tokens, ``buffers.py`` has KV caches of fixed shapes, ``replay.py`` captures and replays, and every other file has the
state of one kind of model. This folder imports the models, and none of them imports it.
"""

from fairseq_ms.core.steps import bottomup, generation, retina, streams, topdown, vanilla  # noqa: F401
from fairseq_ms.core.steps.buffers import state_for
from fairseq_ms.core.steps.replay import Reader, Steps, has_steps, takes_graphs

__all__ = ["Reader", "Steps", "has_steps", "state_for", "takes_graphs"]
