"""Checkpoints of every architecture, exported, and what fairseq makes of them."""

import json
import math
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import torch
from fairseq.sequence_generator import SequenceGenerator
from tokenizers import Tokenizer, decoders, models

from fairseq_ms import cli
from fairseq_ms.export import tokenizer
from fairseq_ms.tools import checkpoints, tokenizing
from fairseq_ms_pipeline import bpe, byte_bpe, text
from fairseq_ms_pipeline.dataset import SPLITS
from fairseq_ms_pipeline.datasets.text import main as prepare_text
from fairseq_ms_pipeline.lines import Lines
from fairseq_ms_pipeline.moses import tokenised
from fairseq_ms_pipeline.subwords import Segmenter
from tests.export.cases import CASES, LEVELS, MAX_LENGTH, ODD, ODD_PROMPTS, PROMPTS, STREAMING, TEXT
from tests.helpers import trained


def make(folder: Path) -> None:
    """A folder for each of ``CASES`` and ``LEVELS``."""
    lines = trained.random_lines(1, 40)
    data = trained.write_corpus(folder / "data" / "bin", {"train": lines, "valid": lines[:5], "test": lines[5:12]})
    byte_data = prepared(folder / "byte_data", lines)
    for number, (name, flags) in enumerate(CASES.items()):
        torch.manual_seed(number)
        own_data, prompts, level = (byte_data, ODD_PROMPTS, None) if name == "byte_bpe" else (data, PROMPTS, "word")
        task = "streaming_language_modeling" if name in STREAMING else "language_modeling"
        path = trained.write_checkpoint(folder / name / "model.pt", own_data, flags[1], *flags[2:], task=task)
        arguments = ["export", str(path), str(folder / name / name), *(["--level", level] if level else [])]
        assert cli.main([*arguments, "--license", "mit"]) == 0, name
        lines_of = tokenizing.lines_of(tokenizing.pipeline_of(own_data, level, None, None, None))
        write_reference(folder / name / "reference.json", path, lines_of, prompts)
    for level in LEVELS:
        write_tokenizer(folder / level, level)


def prepared(folder: Path, lines: list[str]) -> Path:
    """Data of byte-level subwords, with the manifest that says so."""
    for split in SPLITS:
        (folder / "texts" / split).mkdir(parents=True)
        (folder / "texts" / split / "a.txt").write_text("\n".join(lines) + "\n")
    args = ["--input", str(folder / "texts"), "--out", str(folder / "out"), "--bpe", "hf_byte_bpe"]
    with patch.object(sys, "argv", ["prepare", *args, "--bpe-merges", "40", "--workers", "1", "--quiet"]):
        assert prepare_text() == 0
    return folder / "out" / "bin"


def write_tokenizer(folder: Path, level: str) -> None:
    """The tokenizer of a pipeline with Moses in front of subwords and words, and what the pipeline makes of a text."""
    folder.mkdir()
    how, codes = "moses" if level in ("bpe", "word") else "none", None
    if level == "bpe":
        codes = folder / "learnt.bpe"
        bpe.learn([Counter({"said": 9, "done": 8, "did": 7, "word": 3})], 10, 4, codes)
    # What looks like fairseq's own symbols is spelled out in data of characters and bytes.
    given = TEXT if how == "moses" else TEXT + "an <unk> and </s>\n"
    if level == "hf_byte_bpe":
        given = TEXT + ODD
        (folder / "learnt.txt").write_text(given * 3, encoding="utf-8", newline="\n")
        byte_bpe.learn([folder / "learnt.txt"], 40, folder, 1)
        codes = folder / "merges.txt"
    if level == "hf_tokenizer":
        # Of characters.
        letters = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted({*given}))}, []))
        letters.decoder, codes = decoders.Fuse(), folder / "tokenizer.json"
        letters.save(str(codes))
    lines = [tokenised(line, how, "en", level) for line in given.split("\n")]
    segmented = {"bpe": Segmenter(codes).line if codes and level == "bpe" else str, "word": str}
    segmented |= {"char": text.characters, "byte": text.byte_symbols}
    pipeline = tokenizing.Pipeline(level, how, "en", codes)
    if level in ("hf_byte_bpe", "hf_tokenizer"):
        segmented[level] = tokenizing.lines_of(pipeline).segmented
    symbols = " </s> ".join(segmented[level](line) for line in lines).split()
    every = byte_bpe.symbols(folder) if level == "hf_byte_bpe" else {*symbols} - {"</s>"}
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *sorted(every)]
    tokenizer.write(folder, pipeline, vocabulary, 64)
    plain = given if how == "moses" else "\n".join(lines)
    ids = [vocabulary.index(symbol) for symbol in symbols]
    (folder / "expected.json").write_text(json.dumps({"text": given, "ids": ids, "plain": plain}))


@torch.no_grad()
def write_reference(file: Path, path: Path, lines: Lines, prompts: list[str]) -> None:
    """Tokens with fairseq's log-probabilities, and what its generator makes of each prompt, greedily."""
    checkpoint = checkpoints.load(str(path), cpu=True)
    words, model = checkpoint.dictionary, checkpoint.model
    begin = words.bos() if checkpoint.adds_bos else words.eos()
    tokens = torch.randint(4, len(words), (3, 31))
    tokens[:, 0] = begin
    log_probs = model.get_normalized_probs(model(tokens), log_probs=True)
    generator = SequenceGenerator([model], words, beam_size=1, max_len_a=0, max_len_b=MAX_LENGTH, unk_penalty=math.inf)
    # Not the unknown symbol: what stands in no text is not written.
    generator.unk = words.bos()
    continued = []
    for prompt in prompts:
        own = [words.index(symbol) for symbol in lines.symbols_of(prompt)]
        prompt_1T = torch.tensor([[begin, *own]])
        sample = {"net_input": {"src_tokens": prompt_1T}, "id": torch.zeros(1)}
        hypotheses = generator.generate([model], sample, prefix_tokens=prompt_1T[:, 1:], bos_token=begin)
        continued.append(hypotheses[0][0]["tokens"].tolist())
    found = {"tokens": tokens.tolist(), "log_probs": log_probs.tolist(), "prompts": prompts, "continued": continued}
    file.write_text(json.dumps(found))
