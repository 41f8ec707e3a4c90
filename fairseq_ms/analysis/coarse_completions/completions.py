"""What ``coarse_lm`` expects next: the most probable words of the bag after a context.

Multi-scale Transformer LMs, Section 6.2, Table 7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_ms.analysis.checkpoints import Checkpoint
from fairseq_ms.errors import UsageError
from fairseq_ms.models.coarse import CoarseLanguageModel


@dataclass(frozen=True)
class Completion:
    """The words that may come next, most probable first.

    Attributes:
        label: the checkpoint
        scale: how many tokens the bag stands for
        read: how many of the context's last tokens the model read
        words, probabilities: as many as were asked for
    """

    label: str
    scale: int
    read: int
    words: list[str]
    probabilities: list[float]


def scale_of(checkpoint: Checkpoint) -> int:
    """The scale of a checkpoint's model; UsageError when it is no ``coarse_lm``."""
    if not isinstance(checkpoint.model, CoarseLanguageModel):
        arch = checkpoint.cfg.model._name
        raise UsageError(f"CHECKPOINT must hold a model of --arch coarse_lm: {checkpoint.path} holds {arch}")
    return int(checkpoint.model.decoder.core.factor)


def encode(checkpoint: Checkpoint, context: str) -> Tensor:
    """The tokens (T,) of a context, words separated by spaces as in the training text; UsageError if it is empty."""
    tokens = checkpoint.dictionary.encode_line(context, add_if_not_exist=False, append_eos=False).long()
    if tokens.numel() == 0:
        raise UsageError(f"--text must have at least one word: got {context!r}")
    return tokens


def readable(tokens: int, scale: int, positions: int, bos: bool = False) -> int:
    """How many of a context's last tokens to read, so that a k-gram ends exactly with the last of them.

    The first k-gram is the first token alone, so this is 1 more than a multiple of the scale; where every row begins
    with the symbol of ``--add-bos-token``, that is the first, and this is a multiple of the scale.
    """
    first = 0 if bos else 1
    return (min(tokens, positions) - first) // scale * scale + first


@torch.no_grad()
def complete(checkpoint: Checkpoint, tokens_T: Tensor, top: int | None = None) -> Completion:
    """The ``top`` most probable words (as many as the scale, if not given) of the bag after a context."""
    scale = scale_of(checkpoint)
    read = readable(tokens_T.numel(), scale, int(checkpoint.model.max_positions()), checkpoint.adds_bos)
    bos_T = tokens_T.new_tensor([checkpoint.dictionary.bos()] if checkpoint.adds_bos else [])
    source_BT = torch.cat([bos_T, tokens_T[tokens_T.numel() - read :]]).unsqueeze(0).to(checkpoint.device)
    output = checkpoint.model(source_BT, per_block=True)
    log_probs_V = checkpoint.model.get_normalized_probs(output, log_probs=True)[0, -1].float()
    best, words = log_probs_V.topk(min(top or scale, log_probs_V.numel()))
    symbols = [checkpoint.dictionary[int(word)] for word in words]
    return Completion(checkpoint.label, scale, read, symbols, best.exp().tolist())
