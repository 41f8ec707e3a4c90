"""Segments of a corpus that a scale's representation finds alike.

Multi-scale Transformer LMs, Section 6.1, Table 6.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from fairseq_ms.analysis.checkpoints import Checkpoint
from fairseq_ms.errors import UsageError


@dataclass(frozen=True)
class Neighbor:
    """A segment found: its number in the corpus and its cosine similarity to the query."""

    segment: int
    cosine: float


class Described(TypedDict):
    """A segment found, with its text."""

    segment: int
    cosine: float
    text: str


def scales_of(checkpoint: Checkpoint) -> list[int]:
    """The scales whose representations the model gives, finest first; UsageError, saying why, if it gives none."""
    represent = getattr(checkpoint.model.decoder.core, "representations", None)
    if represent is None:
        raise UsageError(
            f"neighbors needs a model that represents segments at its scales: {checkpoint.label} is a "
            f"{checkpoint.cfg.model._name}, which does not"
        )
    probe = torch.full((1, checkpoint.longest or checkpoint.segment), checkpoint.dictionary.unk())
    with torch.no_grad():
        return sorted(represent(probe.to(checkpoint.device)))


def cut_segments(tokens: Tensor, length: int, limit: int | None = None) -> Tensor:
    """Consecutive segments (R, length) of a token sequence; UsageError when there is none."""
    rows = tokens.numel() // length
    if rows < 1:
        raise UsageError(f"--tokens-per-sample must be at most the {tokens.numel()} tokens of the split: got {length}")
    return tokens[: rows * length].view(rows, length)[:limit]


@torch.no_grad()
def embed(
    checkpoint: Checkpoint, segments_RT: Tensor, scales: Sequence[int], max_tokens: int = 8192
) -> dict[int, np.ndarray]:
    """By scale, the mean (R, D) of its representations over each segment, read on its own.

    Raises UsageError when the model has no such scale, or no block of it fits into a segment.
    """
    rows = max(1, max_tokens // segments_RT.size(1))
    parts: dict[int, list[np.ndarray]] = {scale: [] for scale in scales}
    for batch in segments_RT.split(rows):
        found = checkpoint.model.decoder.core.representations(batch.to(checkpoint.device))
        for scale in scales:
            if scale not in found:
                have = ", ".join(f"{factor}x" for factor in sorted(found))
                raise UsageError(f"--scales must be among those of {checkpoint.label}, {have}: got {scale}x")
            if found[scale].size(1) == 0:
                raise UsageError(f"--tokens-per-sample must hold a block of {scale} tokens: got {segments_RT.size(1)}")
            parts[scale].append(found[scale].float().mean(1).cpu().numpy())
    return {scale: np.concatenate(vectors) for scale, vectors in parts.items()}


def search(corpus_RD: np.ndarray, queries_QD: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` most similar rows of the corpus for each query: cosines and row numbers, (Q, count) each.

    The search is exact, by faiss where it is installed and scikit-learn otherwise.
    """
    count = min(count, len(corpus_RD))
    if importlib.util.find_spec("faiss") is not None:
        return _search_by_faiss(corpus_RD, queries_QD, count)
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("neighbors needs the package scikit-learn: run pip install scikit-learn")
    from sklearn.neighbors import NearestNeighbors

    index = NearestNeighbors(n_neighbors=count, metric="cosine", algorithm="brute").fit(corpus_RD)
    distances, rows = index.kneighbors(queries_QD)
    return 1.0 - distances, rows


def _search_by_faiss(corpus_RD: np.ndarray, queries_QD: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    import faiss

    corpus, queries = (_normalised(vectors) for vectors in (corpus_RD, queries_QD))
    index = faiss.IndexFlatIP(corpus.shape[1])
    index.add(corpus)
    cosines, rows = index.search(queries, count)
    return cosines, rows


def _normalised(vectors_RD: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors_RD, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors_RD / np.maximum(lengths, 1e-12), dtype=np.float32)


def nearest(corpus_RD: np.ndarray, query_D: np.ndarray, count: int, exclude: int | None = None) -> list[Neighbor]:
    """The ``count`` nearest segments of one query, without the segment ``exclude``, which is the query itself."""
    cosines, rows = search(corpus_RD, query_D[None], count + (exclude is not None))
    found = [Neighbor(int(row), float(cosine)) for row, cosine in zip(rows[0], cosines[0])]
    return [neighbor for neighbor in found if neighbor.segment != exclude][:count]


def encode_text(checkpoint: Checkpoint, text: str) -> tuple[Tensor, int]:
    """Tokens (1, T) of a text in the form of the corpus, and how many of its words are unknown.

    Raises UsageError when the text is empty or longer than the model's positions.
    """
    tokens = checkpoint.dictionary.encode_line(text, add_if_not_exist=False, append_eos=False).long()
    longest = checkpoint.longest
    if tokens.numel() == 0 or (longest is not None and tokens.numel() > longest):
        raise UsageError(f"--text must have between 1 and {longest} tokens: got {tokens.numel()}")
    return tokens[None], int(tokens.eq(checkpoint.dictionary.unk()).sum())


def as_text(checkpoint: Checkpoint, tokens_T: Tensor, bpe_symbol: str | None) -> str:
    """Tokens as words; with a symbol such as "@@ ", pieces of words are joined and ends of lines dropped."""
    return str(checkpoint.dictionary.string(tokens_T, bpe_symbol)).replace("\n", " ")


def describe(
    checkpoint: Checkpoint, segments_RT: Tensor, found: Sequence[Neighbor], bpe_symbol: str | None
) -> list[Described]:
    """The neighbours with their texts, as dictionaries."""
    return [
        {
            "segment": neighbor.segment,
            "cosine": neighbor.cosine,
            "text": as_text(checkpoint, segments_RT[neighbor.segment], bpe_symbol),
        }
        for neighbor in found
    ]


def check_segment(checkpoint: Checkpoint, length: int) -> None:
    """Raise UsageError when a segment is longer than the model's positions."""
    longest = checkpoint.longest
    if longest is not None and length > longest:
        raise UsageError(
            f"--tokens-per-sample must be at most the {longest} positions of {checkpoint.label}: got {length}"
        )
