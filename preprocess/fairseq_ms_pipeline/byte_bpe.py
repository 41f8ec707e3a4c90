"""Byte-level BPE by Hugging Face's tokenizers, which fairseq reads as --bpe hf_byte_bpe; no text is lost.

A symbol is a token's number in `vocab.json`, as fairseq's encoder writes it. A line ends in fairseq's end of line.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fairseq_ms_pipeline.dataset import CODES
from fairseq_ms_pipeline.files import OtherFlagsNeeded, complete, once_a_file, parsed, part_of
from fairseq_ms_pipeline.hf_tokenizer import load, reads
from fairseq_ms_pipeline.indexed import SPECIAL, read_symbols
from fairseq_ms_pipeline.lines import Lines
from fairseq_ms_pipeline.workers import leave_with

# Characters that are tokenised at a time, whole lines: enough to be fast, while tokens take a hundred times the room.
CHUNK = 1 << 17
END = -1
_any = once_a_file(load)
# The byte of a newline, as byte-level tokens are spelled.
NEWLINE = "\u010a"
# Of fairseq's symbols, those that stand in no text.
OWN = ("<s>", "<pad>", "<unk>")


def _tokenizer(model: models.BPE) -> Tokenizer:
    """As fairseq's encoder tokenises each line; between lines, the newline is a token of its own."""
    tokenizer = Tokenizer(model)
    newline, words = pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([newline, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def learn(
    shards: list[Path], merges: int, folder: Path, workers: int, advance: Callable[[int], object] = lambda count: None
) -> None:
    """Write `vocab.json` and `merges.txt` into a folder: `merges` operations, or up to seven more, so that the
    dictionary's size is a multiple of eight.

    A process of its own learns, which an interruption ends at once: tokenizers hears of none. `advance` is told of
    bytes whose words are counted. ValueError where the process dies, as for want of memory.
    """
    part, read = part_of(folder / "learnt").name, multiprocessing.Value("q", 0)
    job = (shards, merges, folder / part, workers, read, os.getpid())
    process = multiprocessing.Process(target=_learn, args=job, daemon=True)
    process.start()
    try:
        done = 0
        while process.is_alive():
            process.join(0.2)
            advance(read.value - done)
            done = read.value
    finally:
        process.kill()
        process.join()
    if process.exitcode:
        raise ValueError("BPE cannot be learnt: its process died, probably for want of memory.")
    for name in CODES["hf_byte_bpe"]:
        os.replace(folder / f"{part}-{name}", folder / name)


def _learn(shards: list[Path], merges: int, out: Path, workers: int, read: Any, parent: int) -> None:
    leave_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = str(workers > 1).lower()
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    tokenizer = _tokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = -(-(len(alphabet) + merges + 4) // 8) * 8 - 4
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_counted_lines(shards, read), trainer)
    tokenizer.model.save(str(out.parent), out.name)


def _counted_lines(shards: list[Path], read: Any) -> Iterator[str]:
    """All lines, while their bytes are counted."""
    for shard in shards:
        with open(shard, "rb") as file:
            while lines := file.readlines(CHUNK):
                yield from (line.decode("utf-8") for line in lines)
                read.value += sum(map(len, lines))


def codes_of(file: Path) -> tuple[str, str]:
    """`vocab.json` and `merges.txt` of a `tokenizer.json`, its tokens numbered from 0 on.

    ValueError for a file of another kind, from which lines would get other tokens than from the tokenizer itself, which
    the level ``hf_tokenizer`` calls.
    """
    try:
        found = parsed(file.read_text(encoding="utf-8"))
        model, splits = found["model"], found["pre_tokenizer"]
        vocabulary, merges = model["vocab"], model["merges"]
        added = [token for token in found.get("added_tokens") or () if not token["special"]]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"--vocab-from {file} must be a tokenizer.json with BPE merges.") from None
    wanted = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    settings = {"use_regex": True, **(splits or {})}
    others = ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "byte_fallback", "ignore_merges")
    if (
        found.get("normalizer")
        or any(settings.get(name) != value for name, value in wanted.items())
        or any(model.get(name) for name in others)
        or added
        or not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    ):
        raise ValueError(
            f"--vocab-from {file} must be of byte-level BPE as GPT-2's is: without a normalizer or added tokens that "
            "are not special, and with the pre-tokenizer ByteLevel alone, without a prefix space."
        )
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    numbered = {token: number for number, token in enumerate(ordered)}
    return json.dumps(numbered, ensure_ascii=False), "\n".join(["#version: 0.2", *pairs]) + "\n"


@once_a_file
def _loaded(vocabulary: Path) -> Tokenizer:
    # A worker has one processor, and no thread of the process that it was forked from.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return _tokenizer(models.BPE.from_file(*(str(vocabulary.with_name(name)) for name in CODES["hf_byte_bpe"])))


def encode_shard(text: Path, out: Path, folder: Path) -> Counter[str]:
    """Write a shard's tokens as numbers (n,) int32, END for each end of line, and return how often each occurs."""
    tokenizer = _loaded(folder / "vocab.json")
    found = []
    with open(text, encoding="utf-8", newline="\n") as file:
        while lines := file.readlines(CHUNK):
            found.append(np.array(tokenizer.encode_batch_fast(["".join(lines)])[0].ids, dtype=np.int32))
    ids = np.concatenate(found)
    counts = np.bincount(ids)
    newline = tokenizer.token_to_id(NEWLINE)
    ids[ids == newline] = END
    assert newline is not None
    counts[newline : newline + 1] = 0
    with complete(out) as part, open(part, "wb") as file:
        np.save(file, ids)
    return Counter({str(token): int(counts[token]) for token in counts.nonzero()[0]})


def is_dictionary_of(dictionary: Path, file: Path) -> bool:
    """Whether a dictionary's symbols are numbers from 0 on, as `fairseq-ms import` writes them, and enough for all
    tokens that lines may have.
    """
    try:
        found = read_symbols(dictionary)[len(SPECIAL) :]
    except ValueError:
        return False
    return found == [str(number) for number in range(len(found))] and len(found) > _largest(file)


@once_a_file
def _largest(file: Path) -> int:
    """The largest number of a token that lines may have, which special tokens are not."""
    tokenizer = load(file)
    added = (number for number, token in tokenizer.get_added_tokens_decoder().items() if not token.special)
    return max([*tokenizer.get_vocab(with_added_tokens=False).values(), *added], default=-1)


def encode_lines(text: Path, out: Path, folder: Path) -> Counter[str]:
    """As ``encode_shard``, each line by itself, by the folder's `tokenizer.json`.

    OtherFlagsNeeded for a line that has what no token stands for, where the tokenizer has no unknown one.
    """
    tokenizer = _any(folder / "tokenizer.json")
    found: list[int] = []
    with open(text, encoding="utf-8", newline="\n") as file:
        while lines := file.readlines(CHUNK):
            plain = [line.removesuffix("\n") for line in lines]
            try:
                encodings = tokenizer.encode_batch_fast(plain, add_special_tokens=False)
            except Exception as error:  # the library raises no narrower one
                rule = "--vocab-from must have tokens for every line, or an unknown one"
                line = next((line for line in plain if not reads(tokenizer, line)), "")
                raise OtherFlagsNeeded(f"{rule}: {text.name} has {line[:60]!r} ({error}).") from None
            for encoding in encodings:
                found += [*encoding.ids, END]
    ids = np.array(found, dtype=np.int32)
    with complete(out) as part, open(part, "wb") as file:
        np.save(file, ids)
    return Counter(
        {str(token): int(count) for token, count in zip(*np.unique(ids, return_counts=True)) if token != END}
    )


def symbols(folder: Path) -> list[str]:
    """All symbols, whether the text has them or not."""
    return [str(number) for number in range(len(json.loads((folder / "vocab.json").read_text(encoding="utf-8"))))]


class ByteSubwords(Lines):
    """Lines of byte-level subwords, by the operations in ``codes_file`` and the `vocab.json` beside it."""

    level = "hf_byte_bpe"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What splits the lines; it reads the operations once."""
        return _loaded(Path(str(self.codes_file)).with_name("vocab.json"))

    def segmented(self, line: str) -> str:
        return " ".join(map(str, self.tokenizer.encode(line).ids))

    def plain(self, line: str) -> str:
        return self.tokenizer.decode([int(symbol) for symbol in line.split() if symbol.isdecimal()])


def for_transformers(folder: Path, dictionary: Sequence[str]) -> Tokenizer:
    """The tokenizer whose numbers are those of a dictionary's symbols, with that of `</s>` for a newline.

    A text begins with `<s>`.
    """
    learnt, merges = (folder / name for name in CODES["hf_byte_bpe"])
    index = {symbol: number for number, symbol in enumerate(dictionary)}
    vocabulary = {token: index[str(number)] for token, number in json.loads(learnt.read_text("utf-8")).items()}
    # No line has a newline, whose own number stays free.
    own = {symbol: index[symbol] for symbol in OWN} | {NEWLINE: index["</s>"], "<newline>": vocabulary[NEWLINE]}
    pairs: list[tuple[str, str]] = [
        tuple(line.split(" ")) for line in merges.read_text("utf-8").split("\n")[1:] if line
    ]
    tokenizer = _tokenizer(models.BPE(vocab={**vocabulary, **own}, merges=pairs))
    # A newline is none of the special tokens, which decoding may leave out.
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in OWN])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=["<s>", "$A", "$B"], special_tokens=[("<s>", index["<s>"])]
    )
    return tokenizer
