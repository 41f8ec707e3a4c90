"""Nearest segments of a corpus by the representations of every scale.

Multi-scale Transformer LMs, Section 6.1, Table 6.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import comparison
from fairseq_ms.tools.arguments import add_counts, add_list, add_outputs, add_remove_bpe, add_scored

if TYPE_CHECKING:
    from torch import Tensor

    from fairseq_ms.tools.checkpoints import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_scored(parser, split="train")
    add_counts(
        parser,
        ("--tokens-per-sample --segment", None, "tokens of a segment (default: 128, or the model's)"),
        ("--limit", None, "search only the first N segments"),
        ("--top --count", 3, "neighbours"),
    )
    add_list(parser, "--scales", help="such as 4,16,64 (default: all)")
    parser.add_argument("--text", action="append", help="query: a text tokenised like the corpus (repeatable)")
    help = "query: the segment that holds token N of the split (repeatable; default: the middle of the corpus)"
    parser.add_argument("--position", type=int, action="append", metavar="N", help=help)
    add_remove_bpe(parser)
    add_outputs(parser, figure=False)


def run(args: argparse.Namespace) -> None:
    """Print the queries, each followed by its nearest segments at every scale."""
    loaded = comparison.load(args, alike=False)
    results = [result for checkpoint in loaded for result in _asked(args, checkpoint)]
    for result in results:
        print(_format(result))
    comparison.write(args, loaded, results)


def _asked(args: argparse.Namespace, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Each query with its nearest segments at every scale."""
    length = args.tokens_per_sample or min(128, checkpoint.longest or 128)
    checkpoint.check_fits("--tokens-per-sample", length)
    segments = cut_segments(checkpoint.text(args.gen_subset), length, args.limit)
    corpus = embed(checkpoint, segments, args.scales, args.max_tokens)

    def text_of(segment: int) -> str:
        """As words; with a symbol such as "@@ ", pieces of words are joined and ends of lines dropped."""
        return str(checkpoint.dictionary.string(segments[segment], args.remove_bpe)).replace("\n", " ")

    queries: list[tuple[str, dict[int, Tensor], int | None]] = []
    for position in args.position or ([] if args.text else [len(segments) // 2 * length]):
        own = position // length
        if not 0 <= own < len(segments):
            raise UsageError(f"--position must lie in the {len(segments)} segments of {length} tokens: got {position}")
        queries.append((text_of(own), {scale: vectors[own] for scale, vectors in corpus.items()}, own))
    for text in args.text or []:
        tokens = checkpoint.dictionary.encode_line(text, add_if_not_exist=False, append_eos=False).long()[None]
        checkpoint.check_fits("the length of --text", tokens.numel())
        if unknown := int(tokens.eq(checkpoint.dictionary.unk()).sum()):
            print(f"{unknown} of the {tokens.numel()} tokens of --text are unknown to {checkpoint.label}")
        embedded = embed(checkpoint, tokens, list(corpus))
        queries.append((text, {scale: vectors[0] for scale, vectors in embedded.items()}, None))
    results = []
    for text, vectors, segment in queries:
        found = {
            f"{scale}x": [
                {"segment": row, "cosine": cosine, "text": text_of(row)}
                for row, cosine in nearest(corpus[scale], vectors[scale], args.top, segment)
            ]
            for scale in corpus
        }
        results.append({"label": checkpoint.label, "query": text, "segment": segment, "neighbors": found})
    return results


def _format(result: dict[str, Any]) -> str:
    """A query and its neighbours, wrapped."""

    def wrapped(head: str, text: str) -> str:
        return textwrap.fill(text, 110, initial_indent=head, subsequent_indent="    ")

    lines = [wrapped(f"{result['label']}, query: ", result["query"])]
    for scale, found in result["neighbors"].items():
        lines.append(f"  nearest at {scale}")
        lines += [wrapped(f"    {n['cosine']:.4f}  #{n['segment']}: ", n["text"]) for n in found]
    return "\n".join(lines)


def cut_segments(tokens: Tensor, length: int, limit: int | None = None) -> Tensor:
    """Consecutive segments (R, length) of a token sequence; UsageError when there is none."""
    rows = tokens.numel() // length
    if rows < 1:
        raise UsageError(f"--tokens-per-sample must be at most the {tokens.numel()} tokens of the split: got {length}")
    return tokens[: rows * length].view(rows, length)[:limit]


def embed(
    checkpoint: Checkpoint, segments_RT: Tensor, scales: Sequence[int] | None = None, max_tokens: int = 8192
) -> dict[int, Tensor]:
    """By scale, the mean (R, D) of its representations over each segment, read on its own; finest first if all.

    Raises UsageError when the model has no representations or no such scale, or no block of it fits into a segment.
    """
    import torch

    represent = getattr(checkpoint.model.decoder.core, "representations", None)
    if represent is None:
        raise UsageError(
            f"neighbors needs a model that represents segments at its scales: {checkpoint.label} is a "
            f"{checkpoint.cfg.model._name}, which does not"
        )
    parts: dict[int, list[Tensor]] = defaultdict(list)
    for batch in segments_RT.split(max(1, max_tokens // segments_RT.size(1))):
        with torch.no_grad():
            found = represent(batch.to(checkpoint.device))
        for scale in scales or sorted(found):
            if scale not in found:
                have = ", ".join(f"{factor}x" for factor in sorted(found))
                raise UsageError(f"--scales must be among those of {checkpoint.label}, {have}: got {scale}x")
            if found[scale].size(1) == 0:
                raise UsageError(f"--tokens-per-sample must hold a block of {scale} tokens: got {segments_RT.size(1)}")
            parts[scale].append(found[scale].float().mean(1).cpu())
    return {scale: torch.cat(vectors) for scale, vectors in parts.items()}


def nearest(corpus_RD: Tensor, query_D: Tensor, count: int, exclude: int | None = None) -> list[tuple[int, float]]:
    """Row and cosine of the ``count`` most similar rows, without the row ``exclude``, which is the query itself."""
    import torch

    cosines_R = torch.cosine_similarity(corpus_RD, query_D, dim=1)
    found, rows = cosines_R.topk(min(len(corpus_RD), count + (exclude is not None)))
    return [(row, cosine) for row, cosine in zip(rows.tolist(), found.tolist()) if row != exclude][:count]
