"""Evaluation in windows, one target at a time: what every target's window is, and what the model says in it."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor


def block_lengths(lines: list[int], stride: int, break_mode: str) -> list[int]:
    """Targets of each block, from the lengths of a corpus' lines with their ends."""
    if break_mode == "none":
        total = sum(lines)
        return [min(stride, total - start) for start in range(0, total, stride)]
    if break_mode == "eos":
        return lines
    assert break_mode == "complete"
    blocks: list[int] = []
    for line in lines:
        if blocks and blocks[-1] + line <= stride:
            blocks[-1] += line
        else:
            blocks.append(line)
    return blocks


@torch.no_grad()
def naive_log_probs(
    model: Any, tokens: Tensor, blocks: list[int], stride: int, context: int, bos: int | None
) -> Tensor:
    """Log-probability (n,) of every token (n,) of a corpus, each in a row of its own.

    A target's row is what stands before it in its block and, before that, up to ``context`` tokens of earlier blocks,
    fewer where a block is longer than the stride, so that a window holds no more than ``stride + context`` tokens.
    """
    source = torch.cat([tokens.new_tensor([model.decoder.dictionary.eos()]), tokens[:-1]])
    found, begin = [], 0
    for length in blocks:
        room = max(0, min(context, stride + context - length))
        start = max(0, begin - room)
        for position in range(begin, begin + length):
            row = source[start : position + 1].tolist()
            output = model(torch.tensor([row if bos is None else [bos, *row]]))
            log_probs = model.get_normalized_probs(output, log_probs=True, sample=None)
            found.append(log_probs[0, -1, tokens[position]])
        begin += length
    return torch.stack(found)


def scored_log_probs(model: Any, task: Any, subset: str, context: int, bos: bool, **settings: Any) -> Tensor:
    """The same by fairseq's own evaluation with the task's data loader, tokens in the order of the corpus."""
    batches = task.eval_lm_dataloader(
        task.dataset(subset), max_positions=model.max_positions(), context_window=context, **settings
    )
    scorer = SequenceScorer(task.target_dictionary)
    by_block: dict[int, Tensor] = {}
    for batch in batches:
        if "net_input" not in batch:
            continue
        for block, (best,) in zip(batch["id"].tolist(), scorer.generate([model], batch), strict=True):
            assert block not in by_block
            if bos:
                assert best["tokens"][0] == task.target_dictionary.bos()
            by_block[block] = best["positional_scores"][int(bos) :]
    return torch.cat([by_block[block] for block in sorted(by_block)])
