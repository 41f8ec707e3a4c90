"""Lines of text: decoding with a place to point at, whitespace, words that would be misread later, and symbols."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

UNKNOWN = "<unk>"
# What stands for a space where a model reads characters.
SPACE = "\u2581"
# fairseq keeps the bracketed spellings for its own symbols (BPE can also make one the end of a longer word),
# and a word that ends in "@@" reads as an unfinished one. A lone <unk> means what fairseq means by it.
MISREAD = re.compile(r"\S*(?:<s>|</s>|<pad>|@@)|\S+<unk>")


def decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Decode UTF-8 lines without their line ends.

    ValueError names the file, the line (from 1) and the byte offset in the file (from 0) of what is not
    UTF-8.
    """
    offset = 0
    for line_number, raw in enumerate(lines, start=1):
        try:
            line = raw.decode("utf-8-sig" if line_number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            # utf-8-sig counts from the end of the mark.
            at = offset + error.start + (3 if line_number == 1 and raw.startswith(b"\xef\xbb\xbf") else 0)
            raise ValueError(
                f"{name}, line {line_number}, byte offset {at}: byte 0x{raw[at - offset]:02x} is not UTF-8; "
                "convert the file to UTF-8 first."
            ) from None
        offset += len(raw)
        yield line.removesuffix("\n")


def readable_words(line: str) -> list[str]:
    """The line's words, spelled so that fairseq's dictionary and the undoing of BPE return them unchanged.

    Words are separated by any white space. `</s>` becomes `</s >` and `name@@` becomes `name@ @`.
    """
    words = line.split()
    if "@@" not in line and "<" not in line:
        return words
    safe: list[str] = []
    for word in words:
        tail: list[str] = []
        while MISREAD.fullmatch(word):
            tail.append(word[-1])
            word = word[:-1]
        safe.append(word)
        safe.extend(reversed(tail))
    return safe


def spelled(line: str, level: str) -> str:
    """A tokenised line as a model of this level (see `Dataset`) reads it: separated by single spaces, or as it is.

    Where a model reads characters or bytes, the sign that stands for a space is none of the text's: it
    becomes `_`.
    """
    if level in ("hf_byte_bpe", "hf_tokenizer"):
        return line.removesuffix("\n")
    if level in ("char", "byte"):
        return " ".join(line.split()).replace(SPACE, "_")
    return " ".join(readable_words(line))


def characters(line: str) -> str:
    """The characters of a tokenised line, separated by spaces; a space itself becomes SPACE."""
    return " ".join(line.replace(" ", SPACE))


def byte_symbols(line: str) -> str:
    """The UTF-8 bytes of a tokenised line, separated by spaces: ASCII as itself, others as <0xNN>."""
    return " ".join(_BYTES[byte] for byte in line.encode())


_BYTES = [SPACE if n == 32 else chr(n) if n < 128 else f"<0x{n:02X}>" for n in range(256)]
_BYTE_OF = {symbol: bytes([n]) for n, symbol in enumerate(_BYTES)}


def undone(line: str, level: str) -> str:
    """The tokenised line that a line of symbols was made from; `level` as in a data set's declaration."""
    if level == "bpe":
        return (line + " ").replace("@@ ", "").rstrip(" ")
    if level == "char":
        return line.replace(" ", "").replace(SPACE, " ")
    if level == "byte":
        # A model may generate what is no UTF-8, or begin a character and not end it.
        return b"".join(_BYTE_OF.get(symbol, symbol.encode()) for symbol in line.split()).decode(errors="replace")
    return line
