"""Negative log-likelihoods of single tokens, in nats, which most analyses are based on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from fairseq_ms.errors import UsageError
from fairseq_ms.tools.trained import Trained

# From log-probabilities (1, n, V) and targets (1, n) to a number for each target (1, n), or to several (1, n, k).
Measure = Callable[[Tensor, Tensor], Tensor]
# Positions whose logits are in memory at a time: 1,024 of 30,000 words take 120 MB.
_POSITIONS_A_SOFTMAX = 1024


def nll(log_probs_1nV: Tensor, targets_1n: Tensor) -> Tensor:
    """The negative log-likelihood of every target."""
    return -log_probs_1nV.gather(-1, targets_1n.unsqueeze(-1)).squeeze(-1).float()


@torch.no_grad()
def score_windows(
    checkpoint: Trained,
    source_BT: Tensor,
    target_BT: Tensor,
    first: int = 0,
    measure: Measure = nll,
    begun: bool = False,
) -> Tensor:
    """NLL (B, T - first) of the targets from ``first`` on, or another measure (B, T - first, ...).

    Every row is read from its beginning; a streaming model starts it with an empty memory. Where the model was trained
    with an extra first symbol, it is put before every row, unless rows are ``begun`` with it.
    """
    device = checkpoint.device
    source, target = source_BT.to(device), target_BT.to(device)
    if checkpoint.adds_bos and not begun:
        bos = source.new_full((source.size(0), 1), checkpoint.dictionary.bos())
        source, target, first = torch.cat([bos, source], 1), torch.cat([bos, target], 1), first + 1
    return _score(checkpoint, source, target, first, measure=measure)[0]


def _score(
    checkpoint: Trained,
    source_BT: Tensor,
    target_BT: Tensor,
    skip: int = 0,
    memory: object = None,
    measure: Measure = nll,
) -> tuple[Tensor, object]:
    """The measure of the targets after the first ``skip`` ones, and the memory after the last."""
    features, after = checkpoint.read(source_BT, memory)
    features, target = features[:, skip:], target_BT[:, skip:]
    # (B, T, D) -> (1, B * T, D), so that a softmax is over a bounded number of positions
    flat, wanted = features.flatten(0, 1).unsqueeze(0), target.flatten().unsqueeze(0)
    parts = []
    for chunk, ids in zip(flat.split(_POSITIONS_A_SOFTMAX, 1), wanted.split(_POSITIONS_A_SOFTMAX, 1)):
        parts.append(measure(checkpoint.log_probs(chunk, ids), ids))
    values = torch.cat(parts, dim=1) if parts else flat.new_zeros(1, 0)
    return values.view(*target.shape, *values.shape[2:]), after


def score_documents(
    checkpoint: Trained,
    sequences: Sequence[Tensor],
    window: int | None = None,
    context: int | None = None,
    max_tokens: int = 8192,
    measure: Measure = nll,
    bos_alone: bool = False,
) -> np.ndarray:
    """NLL of every token of sequences (n,), or another measure, one sequence after the other.

    Every token is scored once, and each sequence is read on its own. The windows are those of
    ``fairseq-eval-lm --tokens-per-sample WINDOW --context-window CONTEXT``: each has ``window - context`` new tokens
    after up to ``context`` already scored ones, and a sequence's first begins with the end-of-sentence symbol; with
    ``bos_alone``, that of a model with an extra first symbol begins with that alone. The default is half a training
    sample of context. A streaming model has no window: it reads a sequence once, and its memory is the context.
    """
    if checkpoint.streaming:
        rows = max(1, max_tokens // max(sequence.numel() for sequence in sequences))
        parts = [score_streams(checkpoint, sequences[at : at + rows], measure) for at in range(0, len(sequences), rows)]
        return finite(np.concatenate([scores for part in parts for scores in part]))
    window, context = check_window(checkpoint, window, context)
    words = checkpoint.dictionary
    opening = sequences[0].new_tensor([words.bos() if bos_alone else words.eos()])
    source = torch.cat([part for tokens in sequences for part in (opening, tokens[:-1])])
    target = torch.cat(list(sequences))
    scores = np.empty(target.numel())
    with tqdm(total=scores.size, unit=" tokens", desc=checkpoint.label, leave=False, disable=None) as bar:
        for batch in _equal_windows([tokens.numel() for tokens in sequences], window, context, max_tokens, bos_alone):
            spans = [slice(begin, stop) for begin, _, stop in batch]
            sources, targets = (torch.stack([tokens[span] for span in spans]) for tokens in (source, target))
            begun, first = bos_alone and int(sources[0, 0]) == words.bos(), batch[0][1] - batch[0][0]
            values = score_windows(checkpoint, sources, targets, first, measure, begun).cpu().numpy()
            for row, (_, first, stop) in zip(values, batch):
                scores[first:stop] = row
            bar.update(values.size)
    return finite(scores)


def finite(scores: np.ndarray) -> np.ndarray:
    """The scores; UsageError where a model's numbers have overflown. An improbable token's may be infinite."""
    if np.isnan(scores).any():
        raise UsageError("logits must be finite: got NaN or infinity, since numbers are too large for the model's type")
    return scores


@torch.no_grad()
def score_streams(checkpoint: Trained, sequences: Sequence[Tensor], measure: Measure = nll) -> list[np.ndarray]:
    """The measure of every token of sequences (n,) that a streaming model reads side by side, each from its beginning.

    A sequence begins with the end-of-sentence symbol and an empty memory.
    """
    eos, pad = checkpoint.dictionary.eos(), checkpoint.dictionary.pad()
    # What pads the shorter ones stands after them, where no score of theirs can depend on it.
    target = pad_sequence(list(sequences), batch_first=True, padding_value=pad).to(checkpoint.device)
    source = torch.cat([target.new_full((len(sequences), 1), eos), target[:, :-1]], dim=1)
    memory, parts = None, []
    # Whole segments at a time, so that the memory keeps no tokens to read again.
    step = checkpoint.segment * max(1, _POSITIONS_A_SOFTMAX // checkpoint.segment)
    for start in range(0, target.size(1), step):
        span = slice(start, start + step)
        values, memory = _score(checkpoint, source[:, span], target[:, span], memory=memory, measure=measure)
        parts.append(values.cpu())
    rows = torch.cat(parts, dim=1).double().numpy()
    return [row[: tokens.numel()] for row, tokens in zip(rows, sequences)]


def check_window(checkpoint: Trained, window: int | None, context: int | None) -> tuple[int, int]:
    """Window and context in tokens, defaults filled in; UsageError when they do not fit."""
    longest = checkpoint.longest
    if window is None:
        window = checkpoint.segment if longest is None else min(checkpoint.segment, longest)
    checkpoint.check_fits("--tokens-per-sample", window)
    if context is None:
        context = window // 2
    if not 0 <= context < window:
        raise UsageError(f"--context-window must be at least 0 and below the window of {window}: got {context}")
    return window, context


def windows_of(lengths: Sequence[int], window: int, context: int) -> Iterator[tuple[int, int, int]]:
    """(first token read, first token scored, end) of all windows of sequences that lie one after the other."""
    start = 0
    for length in lengths:
        for scored in range(0, length, window - context):
            yield start + max(0, scored - context), start + scored, start + min(scored + window - context, length)
        start += length


def _equal_windows(
    lengths: Sequence[int], window: int, context: int, max_tokens: int, apart: bool
) -> Iterator[list[tuple[int, int, int]]]:
    """All windows, in batches of windows of one shape; those at the start of a sequence may be ``apart``."""
    starts = {0, *itertools.accumulate(lengths)} if apart else set()

    def shape(span: tuple[int, int, int]) -> tuple[int, int, bool]:
        return span[2] - span[0], span[2] - span[1], span[0] in starts

    for (size, *_), group in itertools.groupby(sorted(windows_of(lengths, window, context), key=shape), key=shape):
        same = list(group)
        rows = max(1, max_tokens // size)
        yield from (same[start : start + rows] for start in range(0, len(same), rows))
