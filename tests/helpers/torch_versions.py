"""What the oldest torch that is supported does otherwise."""

import pytest
import torch

# Its checkpoints are not told from other hooks and make a tensor on the default device; it shares no keys on a CPU.
not_oldest = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="about memory that torch 2.6 keeps, or a tensor that its checkpoints make",
)
