"""On how many tokens before it an output of a streaming model depends, by changing tokens one by one."""

from __future__ import annotations

import copy

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor

from fairseq_ms.analysis.context_length.formula import ContextLength
from fairseq_ms.core.streaming import StreamingModel
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.streaming import StreamingLanguageModel


def measured(model: BaseFairseqModel, seed: int = 1) -> ContextLength:
    """The context length of the model itself: the farthest token whose change changes an output.

    Every token of a stream is changed in a row of its own, and whatever an output of the last segment moves with
    is its context. Weights and inputs are random, of the model's own shape and in double precision; with the
    trained ones a dependency could be too small to see.
    """
    if not isinstance(model, StreamingLanguageModel):
        raise UsageError(f"--measure needs a model with a memory, not a {type(model).__name__}")
    network = _randomised(model.decoder.core, seed)
    segment = network.segment_len
    length = (network.memory_reach() + 2) * segment
    generator = torch.Generator().manual_seed(seed)
    width = network.config.dim
    stream = torch.randn(length, width, generator=generator, dtype=torch.float64)
    farthest = [0] * segment
    rows = max(1, 2**22 // (length * width))
    for start in range(0, length, rows):
        changed_at = torch.arange(start, min(start + rows, length))
        inputs = stream.repeat(changed_at.numel(), 1, 1)
        # Of the same shape, because matrix products of another shape round differently.
        reference = _last_segment(network, inputs)
        noise = torch.randn(changed_at.numel(), width, generator=generator, dtype=torch.float64)
        inputs[torch.arange(changed_at.numel()), changed_at] = 3 * noise
        moved = (_last_segment(network, inputs) - reference).abs().amax(-1) > 0
        for offset in range(segment):
            position = length - segment + offset
            seen = changed_at[moved[:, offset]]
            if seen.numel():
                farthest[offset] = max(farthest[offset], position - int(seen.min()))
    return ContextLength(farthest[0], max(farthest) + 1, (farthest[0] + max(farthest) + 1) / 2)


def _randomised(network: StreamingModel, seed: int) -> StreamingModel:
    """A copy on the CPU with weights large enough for every path to show."""
    network = copy.deepcopy(network).cpu().double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() > 1 and not name.startswith(("embed", "project", "adaptive")):
                scale = parameter.size(-1) ** -0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network


@torch.no_grad()
def _last_segment(network: StreamingModel, inputs_RTD: Tensor) -> Tensor:
    """Outputs (R, n_s, D) of the last segment of embedded streams."""
    mems = network.new_memory(inputs_RTD.size(0)).states
    for segment_RTD in inputs_RTD.split(network.segment_len, dim=1):
        outputs, moving = network.forward_segment(segment_RTD, mems, network.sinusoids())
        mems, _ = network.remember(moving, mems)
    return outputs
