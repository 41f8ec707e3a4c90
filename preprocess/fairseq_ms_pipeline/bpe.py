"""Stage 3: learn BPE on a bounded sample of word counts."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fairseq_ms_pipeline.files import OtherFlagsNeeded, complete_text
from fairseq_ms_pipeline.text import UNKNOWN

WITHOUT_SPACES = "For languages that put no spaces between words: --language zh, ja or ko, or --bpe hf_byte_bpe."


def word_counts(shard: Path) -> Counter[str]:
    """How often each word stands in a tokenised shard."""
    counts: Counter[str] = Counter()
    with open(shard, encoding="utf-8", newline="\n") as lines:
        for line in lines:
            counts.update(line.split())
    return counts


def sample(shards: list[Path], limit_bytes: int) -> list[Path]:
    """At most `limit_bytes` of shards, evenly spread over the corpus (at least one)."""
    total = sum(shard.stat().st_size for shard in shards)
    if total <= limit_bytes:
        return shards
    count = max(1, int(len(shards) * limit_bytes / total))
    return [shards[i * len(shards) // count] for i in range(count)]


def learn(
    counters: Iterable[Counter[str]],
    types: int,
    merges: int,
    codes: Path,
    bar: Callable[[Iterable], Iterable] = iter,
) -> None:
    """Learn BPE operations from the `types` most frequent words: `merges` of them, or fewer from a small
    sample.

    `bar` wraps the loop over the operations. OtherFlagsNeeded where there is nothing to learn.
    """
    counts: Counter[str] = Counter()
    for counter in counters:
        counts.update(counter)
        if len(counts) > 8 * types:
            # Counts of the rarest words are only estimates from here on, which bounds the memory.
            counts = Counter(dict(ranked(counts)[: 4 * types]))
    counts.pop(UNKNOWN, None)
    # Sorted, so that ties do not depend on the order in which workers finished.
    vocabulary = io.StringIO("".join(f"{word} {count}\n" for word, count in ranked(counts)[:types]))
    if not vocabulary.getvalue():
        raise OtherFlagsNeeded("BPE cannot be learnt: the training split has no words.")
    from subword_nmt import learn_bpe

    # subword-nmt draws a bar of its own, without a name, beneath ours.
    faster = patch.object(learn_bpe, "max", _most_frequent, create=True)
    with complete_text(codes) as file, patch.object(learn_bpe, "tqdm", bar), faster, redirect_stderr(io.StringIO()):
        learn_bpe.learn_bpe(vocabulary, file, merges, is_dict=True)
        if file.tell() < 16:  # the line of the version alone
            raise OtherFlagsNeeded(
                "BPE cannot be learnt: no two symbols of the training split occur twice side by side."
            )


def _most_frequent(stats: Any, key: object = None) -> Any:
    """What learn_bpe asks of `max`: the greatest of numbers or, of counted pairs, the last of the most frequent.

    subword-nmt calls a function for every pair, which takes two thirds of its time.
    """
    if not stats:
        raise OtherFlagsNeeded(f"BPE cannot be learnt: no word of the training split has two symbols. {WITHOUT_SPACES}")
    if key is None:
        return max(stats)
    top = max(stats.values())
    return max(pair for pair, count in stats.items() if count == top)


def ranked(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Symbols and their counts, the most frequent first."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
