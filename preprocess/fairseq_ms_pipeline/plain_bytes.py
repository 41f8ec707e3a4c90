"""Bytes as byte-level BPE numbers them that has learnt nothing; for these, no tokenizers are needed."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from fairseq_ms_pipeline.lines import Lines


def spelled_bytes() -> list[str]:
    """The tokens of all bytes as byte-level BPE spells them: those that print as they are, and all others, in turn,
    after the last of them.
    """
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


class Bytes(Lines):
    """Lines of byte-level BPE that has learnt nothing, numbered by the `vocab.json` beside ``codes_file``."""

    level = "hf_byte_bpe"

    @cached_property
    def numbers(self) -> list[int]:
        """Those of all bytes."""
        vocabulary = json.loads(Path(str(self.codes_file)).with_name("vocab.json").read_text(encoding="utf-8"))
        return [int(vocabulary[token]) for token in spelled_bytes()]

    def segmented(self, line: str) -> str:
        return " ".join(str(self.numbers[byte]) for byte in line.encode())

    def plain(self, line: str) -> str:
        byte_of = {number: byte for byte, number in enumerate(self.numbers)}
        known = (byte_of.get(int(symbol)) for symbol in line.split() if symbol.isdecimal())
        return bytes(byte for byte in known if byte is not None).decode(errors="replace")
