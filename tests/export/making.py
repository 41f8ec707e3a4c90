"""Checkpoints of every architecture, exported, and what fairseq makes of them."""

import json
from collections import Counter
from pathlib import Path

import torch
from fairseq.sequence_generator import SequenceGenerator

from fairseq_ms import cli
from fairseq_ms.analysis import checkpoints
from fairseq_ms.export import tokenizer
from fairseq_ms_pipeline import bpe, text
from fairseq_ms_pipeline.moses import tokenised
from fairseq_ms_pipeline.subwords import Segmenter
from tests.export.cases import CASES, LEVELS, MAX_LENGTH, PROMPTS, STREAMING, TEXT
from tests.helpers import trained


def make(folder: Path) -> None:
    """A folder for each of ``CASES`` and ``LEVELS``."""
    lines = trained.random_lines(1, 40)
    data = trained.write_corpus(folder / "data" / "bin", {"train": lines, "valid": lines[:5], "test": lines[5:12]})
    for number, (name, flags) in enumerate(CASES.items()):
        torch.manual_seed(number)
        task = "streaming_language_modeling" if name in STREAMING else "language_modeling"
        path = trained.write_checkpoint(folder / name / "model.pt", data, flags[1], *flags[2:], task=task)
        arguments = ["export", str(path), str(folder / name / name), "--level", "word", "--license", "mit"]
        assert cli.main(arguments) == 0, name
        write_reference(folder / name / "reference.json", path)
    for level in LEVELS:
        write_tokenizer(folder / level, level)


def write_tokenizer(folder: Path, level: str) -> None:
    """The tokenizer of a pipeline with Moses in front of subwords and words, and what the pipeline makes of a text."""
    folder.mkdir()
    how, codes = "moses" if level in ("bpe", "word") else "none", None
    if level == "bpe":
        codes = folder / "learnt.bpe"
        bpe.learn([Counter({"said": 9, "done": 8, "did": 7, "word": 3})], 10, 4, codes)
    # What looks like fairseq's own symbols is spelled out in data of characters and bytes.
    given = TEXT if how == "moses" else TEXT + "an <unk> and </s>\n"
    lines = [tokenised(line, how, "en", level) for line in given.split("\n")]
    segmented = {"bpe": Segmenter(codes).line if codes else None, "word": str}
    segmented |= {"char": text.characters, "byte": text.byte_symbols}
    symbols = " </s> ".join(segmented[level](line) for line in lines).split()
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *sorted({*symbols} - {"</s>"})]
    pipeline = tokenizer.Pipeline(level, how, "en", codes)
    tokenizer.write(folder, pipeline, vocabulary, "</s>", 64)
    plain = given if how == "moses" else "\n".join(lines)
    (folder / "expected.json").write_text(json.dumps({"text": given, "symbols": symbols, "plain": plain}))


@torch.no_grad()
def write_reference(file: Path, path: Path) -> None:
    """Tokens with fairseq's log-probabilities, and what its generator makes of each prompt, greedily."""
    checkpoint = checkpoints.load(str(path), cpu=True)
    words, model = checkpoint.dictionary, checkpoint.model
    begin = words.bos() if checkpoint.adds_bos else words.eos()
    tokens = torch.randint(4, len(words), (3, 31))
    tokens[:, 0] = begin
    log_probs = model.get_normalized_probs(model(tokens), log_probs=True)
    generator = SequenceGenerator([model], words, beam_size=1, max_len_a=0, max_len_b=MAX_LENGTH)
    continued = []
    for prompt in PROMPTS:
        own = words.encode_line(prompt, append_eos=False, add_if_not_exist=False).tolist()
        prompt_1T = torch.tensor([[begin, *own]])
        sample = {"net_input": {"src_tokens": prompt_1T}, "id": torch.zeros(1)}
        hypotheses = generator.generate([model], sample, prefix_tokens=prompt_1T[:, 1:], bos_token=begin)
        continued.append(hypotheses[0][0]["tokens"].tolist())
    found = {"tokens": tokens.tolist(), "log_probs": log_probs.tolist(), "prompts": PROMPTS, "continued": continued}
    file.write_text(json.dumps(found))
