"""Perplexity of samples under GPT-2 or another causal model of Hugging Face's transformers.

Multi-scale Transformer LMs, Section 6.3.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

from fairseq_ms.analysis import report
from fairseq_ms.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(path: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a local folder; nothing is downloaded and no code of the folder is run.

    Raises UsageError when transformers is not installed or the folder holds no causal language model.
    """
    report.require_package("transformers", "--hf-lm", "transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not Path(path).is_dir():
        raise UsageError(f"--hf-lm must be a local folder: {path} does not exist")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"--hf-lm must hold a causal language model: {path} does not ({error})") from error
    return model.to(device).eval(), tokenizer


@torch.no_grad()
def perplexity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, contexts: Sequence[str], samples: Sequence[str]
) -> float:
    """exp of the mean NLL of all tokens of the samples (the model's own tokens), each after its context.

    A context is cut at its beginning where it does not fit before the sample; without any, the sample's first
    token is given. A sample begins with what joins it to its context, such as a space. Raises UsageError when a
    sample is longer than the model's positions.
    """
    total, count = 0.0, 0
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None) or sys.maxsize
    for context, sample in zip(contexts, samples):
        before = tokenizer(context)["input_ids"]
        # Some tokenizers put a symbol before a text, which belongs before the context alone.
        after = tokenizer(sample, add_special_tokens=False)["input_ids"]
        if len(after) >= positions:
            raise UsageError(f"--length must fit into the {positions} positions of --hf-lm: got {len(after)} tokens")
        before = before[max(0, len(before) + len(after) - positions) :]
        if not before:
            before, after = after[:1], after[1:]
        ids = torch.tensor([[*before, *after]], device=model.device)
        logits = model(ids).logits[0, len(before) - 1 : -1]
        total += float(F.cross_entropy(logits.float(), ids[0, len(before) :], reduction="sum"))
        count += len(after)
    return float(np.exp(total / count))
