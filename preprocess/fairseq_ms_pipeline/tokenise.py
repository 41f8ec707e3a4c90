"""Stage 2: words separated by single spaces, or the text as it is, one finished file per shard."""

from __future__ import annotations

from pathlib import Path

from fairseq_ms_pipeline.files import complete_text, write_json
from fairseq_ms_pipeline.moses import tokenised


def tokenise_shard(raw: Path, out: Path, how: str, language: str, level: str) -> int:
    """Tokenise one shard, write its counts beside it, and return the bytes read.

    Counts: lines, words, characters and bytes of the tokenised text (line ends included in the last two),
    and `source_bytes`, the same of the text as it was.
    """
    counts = dict.fromkeys(("lines", "words", "characters", "bytes", "source_bytes"), 0)
    with open(raw, encoding="utf-8", newline="\n") as lines, complete_text(out) as file:
        for line in lines:
            text = tokenised(line, how, language, level)
            file.write(text + "\n")
            counts["lines"] += 1
            counts["words"] += len(text.split())
            counts["characters"] += len(text) + 1
            counts["bytes"] += len(text.encode()) + 1
            counts["source_bytes"] += len(line.encode())
        # Inside the block: the shard counts as done only when its counts are there too.
        write_json(out.with_suffix(".json"), counts)
    return counts["source_bytes"]
