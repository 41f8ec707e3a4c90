"""Checkpoints of fairseq and of a plain loop, told apart."""

from __future__ import annotations

import pickle

import torch

from fairseq_ms.tools import plain, whole_files
from fairseq_ms.tools.arguments import check_checkpoint, register, split_label
from fairseq_ms.tools.trained import Trained


def load(spec: str, data: str | None = None, cpu: bool = False) -> Trained:
    """Load ``[LABEL=]FILE`` of fairseq, or of a plain loop, whose model is then asked about ``data``.

    Raises UsageError as ``checkpoints.load`` and ``plain.load`` do, and where fairseq is missing for its own.
    """
    label, path = split_label(spec)
    check_checkpoint(path)
    try:
        # Only the list of what it holds is read.
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, OSError, pickle.UnpicklingError, EOFError):
        saved = None
    is_plain = isinstance(saved, dict) and {"model", "name", "configuration", "tokenizer"} <= saved.keys()
    if saved is None or is_plain:
        # fairseq's are looked at where they are read.
        whole_files.check(path)
    if is_plain:
        return plain.load(label, path, saved, data, cpu)
    register()
    from fairseq_ms.tools import checkpoints

    return checkpoints.load(spec, data, cpu)
