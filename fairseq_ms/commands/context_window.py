"""Perplexity against the number of context tokens a model is given.

Multi-scale Transformer LMs, Section 5.3, Table 4's last block.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import comparison
from fairseq_ms.tools.arguments import add_counts, add_list, add_outputs, add_scored, add_seed

if TYPE_CHECKING:
    from torch import Tensor

    from fairseq_ms.tools.checkpoints import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_scored(parser)
    help = "context lengths (default: powers of two up to 512, as far as all the models have positions)"
    add_list(parser, "--contexts", "--context", help=help)
    add_counts(parser, ("--limit --targets", 1000, "predict N tokens"))
    add_seed(parser, "the bootstrap")
    add_outputs(parser)


def run(args: argparse.Namespace) -> None:
    """Print one row a context length, per checkpoint the perplexity and its band."""
    loaded = comparison.load(args)
    most = min(512, *(checkpoint.longest or 512 for checkpoint in loaded))
    contexts = sorted(set(args.contexts or [2**power for power in range(most.bit_length())]))
    for checkpoint in loaded:
        checkpoint.check_fits("--contexts", contexts[-1])
    tokens = loaded[0].text(args.gen_subset)
    targets = choose_targets(tokens.numel(), contexts[-1], args.limit)
    bands, results = {}, []
    for checkpoint in loaded:
        nll = [nll_with_context(checkpoint, tokens, targets, length, args.max_tokens) for length in contexts]
        bands[checkpoint.label] = band = perplexities(np.stack(nll), args.seed)
        columns = (contexts, np.mean(nll, axis=1).tolist(), *(values.tolist() for values in band))
        points = [dict(zip(("context", "nll", "perplexity", "low", "high"), point)) for point in zip(*columns)]
        results.append({"label": checkpoint.label, "targets": len(targets), "by_context": points})
    print(
        f"perplexity of the same {len(targets)} tokens, given so many tokens of context; "
        "bands are of the difference to the longest"
    )
    print(comparison.band_table("context", contexts, bands, 2))
    labels = ("context given, in tokens", "perplexity")
    comparison.write(args, loaded, results, lambda figure: comparison.draw_bands(figure, contexts, bands, *labels))


def choose_targets(length: int, most: int, count: int) -> np.ndarray:
    """Positions of up to ``count`` tokens, evenly spread, with ``most`` tokens before them; UsageError for none."""
    if length <= most:
        raise UsageError(f"--contexts must be shorter than the split, which has {length} tokens: got {most}")
    return np.unique(np.linspace(most, length - 1, min(count, length - most)).round().astype(np.int64))


def nll_with_context(
    checkpoint: Checkpoint, tokens: Tensor, targets: np.ndarray, context: int, max_tokens: int = 8192
) -> np.ndarray:
    """NLL (targets,) of the tokens at the positions ``targets``, the model reading only the last ``context``."""
    import torch

    from fairseq_ms.tools import scoring

    parts = []
    for chunk in torch.from_numpy(targets).split(max(1, max_tokens // context)):
        rows = chunk[:, None] + torch.arange(-context, 0)
        parts.append(scoring.score_windows(checkpoint, tokens[rows], tokens[rows + 1], first=context - 1)[:, 0].cpu())
    return torch.cat(parts).double().numpy()


def perplexities(nll_CR: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Perplexity by context (C,), the longest last, with the low and high end of its band.

    The bootstrap band is that of the difference to the longest context, target by target: how much more the
    model has to gain is known far better than how hard these targets are.
    """
    low, high = comparison.bootstrap_band((nll_CR - nll_CR[-1]).T, seed)
    longest = nll_CR[-1].mean()
    return np.exp(nll_CR.mean(1)), np.exp(longest + low), np.exp(longest + high)
