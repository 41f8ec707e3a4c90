"""Strided evaluation whose windows do not depend on who puts the batches together.

fairseq's ``--context-window`` gives every block of a corpus the tokens before it as context, and remembers
them from one batch to the next while it collates. That is right for a single worker that sees every batch,
and wrong for several workers or shards. Here a block's context is read from the blocks before it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from fairseq.data import LMContextWindowDataset
from fairseq.tasks import language_modeling
from torch import Tensor

from fairseq_ms.errors import UsageError


class ContextWindowDataset(LMContextWindowDataset):
    """Blocks of a corpus, each with up to ``context_window`` source tokens before it (arguments as fairseq's).

    Every target is scored in exactly one block; ``start_indices`` says where a block's own targets begin.
    """

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index], "context": self._context(int(index))}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """fairseq's batch of the blocks, with source (B, T + context) and target moved behind their contexts."""
        batch = self.dataset.collater(samples)
        if not samples:
            return batch
        net_input, target = batch["net_input"], batch["target"]
        rows, width = net_input["src_tokens"].shape
        tokens = target.new_full((rows, width + self.context_window), self.pad_idx)
        targets = torch.full_like(tokens, self.pad_idx)
        starts = []
        for row, sample in enumerate(samples):
            length = int(net_input["src_tokens"][row].ne(self.pad_idx).sum())
            room = self.tokens_per_sample + self.context_window - length
            context = sample["context"][max(0, sample["context"].numel() - room) :]
            start = context.numel()
            tokens[row, :start] = context
            tokens[row, start : start + width] = net_input["src_tokens"][row]
            targets[row, start : start + width] = target[row]
            starts.append(start)
        net_input["src_tokens"] = tokens
        net_input["src_lengths"] = net_input["src_lengths"] + torch.tensor(starts)
        batch["target"] = targets
        batch["start_indices"] = starts
        return batch

    def _context(self, index: int) -> Tensor:
        """The last ``context_window`` source tokens of the blocks before ``index``, fewer at the beginning."""
        pieces: list[Tensor] = []
        missing = self.context_window
        while missing > 0 and index > 0:
            index -= 1
            pieces.append(self.dataset[index]["source"][-missing:])
            missing -= pieces[-1].numel()
        return torch.cat(pieces[::-1]) if pieces else torch.empty(0, dtype=torch.long)


def install() -> None:
    """Have fairseq's ``language_modeling`` task evaluate with ``ContextWindowDataset``, and never silently less.

    fairseq leaves out blocks that are longer than the model's positions; here that is a ``UsageError``.
    """
    task = language_modeling.LanguageModelingTask
    language_modeling.LMContextWindowDataset = ContextWindowDataset
    if getattr(task.eval_lm_dataloader, "refuses_what_does_not_fit", False):
        return
    load = task.eval_lm_dataloader

    @functools.wraps(load)
    def checked(self: Any, dataset: Any, *args: Any, **settings: Any) -> Any:
        positions, context = settings.get("max_positions"), settings.get("context_window", 0)
        window = self.args.tokens_per_sample + context
        if positions is not None and window > positions:
            raise UsageError(f"--tokens-per-sample must not exceed the model's {positions} positions: got {window}")
        longest = int(np.max(dataset.sizes, initial=0))
        if positions is not None and longest > positions:
            raise UsageError(
                f"--sample-break-mode {self.args.sample_break_mode} needs lines of at most the model's {positions} "
                f"positions, and --sample-break-mode none cuts longer ones: got a line of {longest} tokens"
            )
        return load(self, dataset, *args, **settings)

    checked.refuses_what_does_not_fit = True  # type: ignore[attr-defined]
    task.eval_lm_dataloader = checked
