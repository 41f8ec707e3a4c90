"""Strided evaluation whose windows do not depend on who puts the batches together.

fairseq's ``--context-window`` remembers the tokens before a block from one batch to the next while it collates, which
is wrong where there are several workers or shards. Here a block's context is read from the blocks before it.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.data import LMContextWindowDataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fairseq_ms.errors import UsageError


class ContextWindowDataset(LMContextWindowDataset):
    """Blocks of a corpus, each with up to ``context_window`` source tokens before it (arguments as fairseq's).

    Every target is scored in exactly one block; ``start_indices`` says where a block's own targets begin. A block
    that is longer than ``tokens_per_sample``, as a line can be, has so much less context: tokens of the blocks before
    it and of the block itself are at most ``tokens_per_sample + context_window``. The symbol of ``--add-bos-token``
    begins the window, as it began every row in training, and comes on top.
    """

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index], "context": self._context(int(index))}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """fairseq's batch of the blocks, with source and target (B, longest window) moved after their contexts."""
        batch = self.dataset.collater(samples)
        if not samples:
            return batch
        net_input, target = batch["net_input"], batch["target"]
        bos = int(self.dataset.add_bos_token)
        sources, targets, starts = [], [], []
        for row, sample in enumerate(samples):
            length = sample["source"].numel()
            room = max(0, self.tokens_per_sample + self.context_window + bos - length)
            context = sample["context"][max(0, sample["context"].numel() - room) :]
            source_T, target_T = net_input["src_tokens"][row, :length], target[row, :length]
            sources.append(torch.cat([source_T[:bos], context, source_T[bos:]]))
            targets.append(torch.cat([torch.full_like(context, self.pad_idx), target_T]))
            starts.append(context.numel())
        net_input["src_tokens"] = pad_sequence(sources, batch_first=True, padding_value=self.pad_idx)
        net_input["src_lengths"] = net_input["src_lengths"] + torch.tensor(starts)
        batch["target"] = pad_sequence(targets, batch_first=True, padding_value=self.pad_idx)
        batch["start_indices"] = starts
        return batch

    def _context(self, index: int) -> Tensor:
        """The last ``context_window`` source tokens of the blocks before ``index``, fewer at the beginning."""
        pieces: list[Tensor] = []
        missing = self.context_window
        while missing > 0 and index > 0:
            index -= 1
            source = self.dataset[index]["source"][int(self.dataset.add_bos_token) :]
            pieces.append(source[-missing:])
            missing -= pieces[-1].numel()
        return torch.cat(pieces[::-1]) if pieces else torch.empty(0, dtype=torch.long)


def with_contexts(
    original: Any,
    task: Any,
    dataset: Any,
    max_tokens: int | None = 36000,
    batch_size: int | None = None,
    max_positions: Any = None,
    num_shards: int = 1,
    shard_id: int = 0,
    num_workers: int = 1,
    data_buffer_size: int = 10,
    context_window: int = 0,
) -> Any:
    """``eval_lm_dataloader`` of fairseq's ``language_modeling`` task, with ``ContextWindowDataset``.

    fairseq leaves out blocks that are longer than the model's positions, as a line that is one can be; here that is a
    ``UsageError``.
    """
    if context_window < 0:
        raise UsageError(f"--context-window must be at least 0: got {context_window}")
    tokens, mode = task.args.tokens_per_sample, task.args.sample_break_mode
    if isinstance(max_positions, tuple):
        max_positions = min(max_positions)
    if max_positions is not None:
        most, longest = f"the model's {max_positions} positions", int(max(dataset.sizes, default=0))
        if (window := tokens + context_window) > max_positions:
            raise UsageError(f"--tokens-per-sample must not exceed {most}: got {window}")
        if longest > max_positions:
            raise UsageError(
                f"--sample-break-mode {mode} needs lines of at most {most}, and --sample-break-mode none cuts longer "
                f"ones: got a line of {longest} tokens"
            )
    if context_window > 0:
        dataset = ContextWindowDataset(dataset, tokens, context_window, task.source_dictionary.pad())
    shards = num_shards, shard_id, num_workers, data_buffer_size
    return original(task, dataset, max_tokens, batch_size, max_positions, *shards)
