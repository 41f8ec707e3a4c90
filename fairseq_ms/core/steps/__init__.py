"""Decoding on a GPU by CUDA graphs: each token is one replay of a captured decoding step.

A captured step runs the same operations on the same memory whenever it is replayed. ``buffers.py`` has KV caches of
fixed shapes, ``states.py`` and ``streams.py`` the models' states made of them, ``replay.py`` captures and replays. This
folder imports the models; of the models, only ``generate`` imports it, which reads tokens by a ``Reader``.
"""

from fairseq_ms.core.steps.replay import Reader, Steps, has_steps, takes_graphs

__all__ = ["Reader", "Steps", "has_steps", "takes_graphs"]
