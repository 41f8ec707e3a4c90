"""How many tokens back an output of any model can depend on by formula, the way it is evaluated."""

from __future__ import annotations

from fairseq_ms.analysis.checkpoints import Checkpoint
from fairseq_ms.analysis.context_length import formula
from fairseq_ms.analysis.context_length.formula import ContextLength
from fairseq_ms.core import CompressiveTransformer, Retina, TransformerQL, TransformerXL


def reach(checkpoint: Checkpoint, window: int, context: int) -> ContextLength:
    """The context length of a streaming model, or of another one in windows of which ``context`` tokens come first.

    The paper's formula holds for a Transformer-XL or Compressive Transformer whose memory is a multiple of the segment.
    Otherwise the oldest state that a layer remembers lies inside a segment, and saw back from that one's beginning.

    A model without a memory sees what is in its window: ``context`` tokens before the first scored one, and all of the
    window before the last. Through ``--scale-windows`` it sees less. A block of k tokens is seen if it begins less than
    ``far`` tokens before the position that looks at it. From a position at a multiple of k and from everywhere inside a
    block, that is the same block; so every layer but the last goes back by a multiple of k, and the last by more where
    its position lies late in a block of its own.
    """
    model = checkpoint.model.decoder.core
    if isinstance(model, TransformerQL):
        return formula.by_formula(model)
    if isinstance(model, TransformerXL):
        remembered, begin, oldest = model.mem_len, 0, 0
        if isinstance(model, CompressiveTransformer):
            remembered += model.config.compression_rate * model.config.compressed_mem_len
        for _ in model.layers:
            oldest = begin - remembered
            begin = oldest // model.segment_len * model.segment_len
        return ContextLength.of(-oldest, model.segment_len)
    sure, most = context, window - 1
    if isinstance(model, Retina):
        far, factor = model.groups[-1].far, model.groups[-1].factor
        before = (len(model.layers) - 1) * ((far - 1) // factor * factor)
        last = [phase + (far - 1 - phase) // factor * factor for phase in range(factor)]
        sure, most = min(sure, before + min(last)), min(most, before + max(last))
    return ContextLength(sure, most + 1, (sure + most + 1) / 2)
