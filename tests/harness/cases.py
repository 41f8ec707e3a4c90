"""The checkpoints that the harness asks in the tests, their text, and the questions."""

import random
from dataclasses import dataclass, field

from tests.export import cases as exported

SPLITS = ("train", "valid", "test")
_LETTERS = "abcdefgh"


def _text(seed: int, lines: int) -> str:
    """Lines of made-up words, as WikiText has them: with empty lines, and spaces at both ends."""
    draw = random.Random(2)
    words = ["".join(draw.choices(_LETTERS, k=draw.randint(1, 5))) for _ in range(40)] + ["é", ",", "."]
    draw = random.Random(seed)
    drawn = (f" {' '.join(draw.choices(words, k=draw.randint(1, 9)))} \n" for _ in range(lines))
    return "".join(line + " \n" * (draw.random() < 0.2) for line in drawn)


TEXTS = {split: _text(seed, lines) for seed, (split, lines) in enumerate(zip(SPLITS, (150, 20, 30), strict=True))}
_WORDS = TEXTS["test"].split()
# Contexts with the continuations that they are offered, one with another white space at the seam.
QUESTIONS = [
    (" ".join(_WORDS[:4]), [f" {_WORDS[4]}", f" {_WORDS[9]} {_WORDS[1]}", f" {_WORDS[6]}\n"]),
    (f"{_WORDS[5]} {_WORDS[6]} ", [_WORDS[7], f"{_WORDS[8]} {_WORDS[2]} {_WORDS[1]}"]),
    (f"{' '.join(_WORDS[:9])}\n{_WORDS[2]}", [f" {_WORDS[3]}", f" {_WORDS[5]}"]),
]


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Attributes:
        prepare: the arguments of ``fairseq-ms prepare`` that decide the pipeline
        flags: the architecture and its flags
        window: how running text is scored
        task: fairseq's
    """

    prepare: tuple[str, ...]
    flags: list[str]
    window: dict[str, int] = field(default_factory=dict)
    task: str = "language_modeling"


def _flags(name: str) -> list[str]:
    return exported.CASES[name][1:]


_KEPT = ("--tokenise", "none", "--blank-lines", "keep")
_STREAMS = "streaming_language_modeling"
CASES = {
    "retina": Case(
        ("text", *_KEPT, "--bpe-merges", "30"), _flags("retina"), {"tokens_per_sample": 32, "context_window": 13}
    ),
    "transformer_ql": Case(("text", *_KEPT, "--bpe-merges", "30"), _flags("transformer_ql"), task=_STREAMS),
    # Characters by a symbol that ends words; the default window.
    "haed": Case(("chars",), [*_flags("haed"), "--separators", "▁ </s>"]),
    "lines": Case(
        ("text", *_KEPT, "--level", "word"), [*_flags("vanilla"), "--sample-break-mode", "eos"], {"context_window": 0}
    ),
    # Scored as tokenised text: Moses leaves out the empty lines of the raw one.
    "moses": Case(("text", "--bpe-merges", "30"), _flags("window"), {"context_window": 5}),
}

# What the command cannot do with the first of these: model arguments, flags, and what it says.
REFUSED: list[tuple[str, list[str], str]] = [
    ("tokens_per_sample=99", [], "--tokens-per-sample must lie between 1 and the 40 positions"),
    ("pretrained=gpt2", [], "--model_args of fairseq_ms has no pretrained"),
    ("data=nowhere", [], "--data must be a folder that fairseq-preprocess wrote"),
    ("level=letters", [], "--level must be one of word, bpe, hf_byte_bpe, hf_tokenizer, char, byte"),
    ("language=de", [], "--language has no effect without --tokenise moses"),
    ("", ["--batch_size", "auto"], "--batch_size must be a whole number of at least 1"),
    ("", ["--gen_kwargs", "num_beams=4"], "generation_kwargs must be among until, max_gen_toks, do_sample"),
    ("", ["--gen_kwargs", "top_p=1.5"], "temperature and top_k must be at least 0, and top_p above 0"),
]
