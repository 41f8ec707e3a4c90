"""Stage 4: the symbols a model reads, subwords, words, characters or bytes, and how often each stands in a
shard.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fairseq_ms_pipeline.bpe import word_counts
from fairseq_ms_pipeline.dataset import CODES, NUMBERED
from fairseq_ms_pipeline.files import complete_text, once_a_file, write_json
from fairseq_ms_pipeline.subwords import Segmenter
from fairseq_ms_pipeline.text import byte_symbols, characters

_segmenter = once_a_file(Segmenter)


def segment_shard(tokenised: Path, out: Path, level: str, folder: Path) -> int:
    """Write the symbols of one shard and, beside them, the counts of its symbols; return the bytes read.

    `folder` has what BPE has learnt.

    At level `word` the tokenised text is the symbols already, and only the counts are written; at the levels `NUMBERED`
    the symbols are an array of numbers.
    """
    if level == "word":
        counts = word_counts(tokenised)
    elif level in NUMBERED:
        from fairseq_ms_pipeline import byte_bpe

        encode = byte_bpe.encode_shard if level == "hf_byte_bpe" else byte_bpe.encode_lines
        counts = encode(tokenised, out.with_suffix(".npy"), folder)
    else:
        counts = Counter()
        symbols_of = {"char": characters, "byte": byte_symbols}
        segmented = symbols_of.get(level) or _segmenter(folder / CODES[level][0]).line
        with open(tokenised, encoding="utf-8", newline="\n") as lines, complete_text(out) as file:
            for line in lines:
                text = segmented(line.rstrip("\n"))
                counts.update(text.split())
                file.write(text + "\n")
    # Last: with its counts the shard counts as done.
    write_json(out.with_suffix(".json"), counts)
    return tokenised.stat().st_size
