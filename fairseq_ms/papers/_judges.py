"""Perplexity of samples under other models: Kneser-Ney n-grams by kenlm, and GPT-2 or its like by transformers.

Multi-scale Transformer LMs, Section 6.3, Table 5.
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import report

if TYPE_CHECKING:
    import torch
    from sacremoses import MosesDetokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Judge = Callable[[Sequence[Sequence[str]], Sequence[Sequence[str]]], float]
"""The perplexity of samples after their contexts."""
_LN10 = math.log(10.0)
# WikiText's marks for signs inside of numbers and words; Moses' own is for hyphens alone.
_INSIDE = re.compile(r" @([-,.])@ ")
_END = "</s>"


class NGramModel:
    """A kenlm model, estimated elsewhere, from an ARPA or binary file.

    Raises UsageError when kenlm is not installed or the file is no such model.
    """

    def __init__(self, path: str) -> None:
        report.require_package("kenlm", "--ngram-lm", "kenlm")
        import kenlm

        if not Path(path).is_file():
            raise UsageError(f"--ngram-lm must be an ARPA or binary file: {path} does not exist")
        try:
            # kenlm prints a progress bar for ARPA files unless it is told not to.
            config = kenlm.Config()
            config.show_progress = False
            self.model = kenlm.Model(path, config)
        except OSError as error:
            raise UsageError(f"--ngram-lm must be an ARPA or binary file: {path} is not ({error})") from error
        self._state = kenlm.State

    def score(self, context: Sequence[str], words: Sequence[str]) -> list[float]:
        """Natural log probability of every word, read after the context.

        ``</s>`` ends a sentence, in context and words alike: it is scored as the model's end of sentence, and
        what follows begins a new one. The beginning of the context begins a sentence.
        """
        state, new = self._state(), self._state()
        self.model.BeginSentenceWrite(state)
        scores = []
        for position, word in enumerate([*context, *words]):
            value = self.model.BaseScore(state, word, new)
            if position >= len(context):
                scores.append(value * _LN10)
            if word == _END:
                self.model.BeginSentenceWrite(new)
            state, new = new, state
        return scores

    def perplexity(self, contexts: Iterable[Sequence[str]], samples: Iterable[Sequence[str]]) -> float:
        """exp of the mean negative log probability of all words of the samples, each after its context."""
        scores = [score for context, words in zip(contexts, samples) for score in self.score(context, words)]
        return math.exp(-statistics.fmean(scores))


def sentences(words: Iterable[str]) -> list[str]:
    """The lines of a text whose lines end in ``</s>``, the last one perhaps without."""
    return [line.strip() for line in " ".join(words).removesuffix(_END).split(_END)]


def estimate(lines: Iterable[str], order: int, folder: str) -> str:
    """Estimate a Kneser-Ney model of a tokenised text with kenlm's lmplz; the path of its ARPA file in ``folder``.

    Raises UsageError when lmplz is not installed or fails, which it does on very small texts.
    """
    if shutil.which("lmplz") is None:
        raise UsageError(
            "--estimate-ngram-lm needs kenlm's program lmplz on the PATH (see https://github.com/kpu/kenlm), "
            "which pip does not install; or give an ARPA file with --ngram-lm"
        )
    path = str(Path(folder) / f"{order}gram.arpa")
    with tempfile.TemporaryFile("w+", encoding="utf-8") as text, open(path, "wb") as arpa:
        text.writelines(line + "\n" for line in lines)
        text.seek(0)
        done = subprocess.run(
            # Little data leaves some count of counts empty, for which lmplz wants to be allowed a fallback.
            # <unk> in a text, which lmplz would refuse, then counts as the space between words.
            ["lmplz", "-o", str(order), "--discount_fallback", "--skip_symbols", "-T", folder, "-S", "20%"],
            stdin=text,
            stdout=arpa,
            stderr=subprocess.PIPE,
            check=False,
        )
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UsageError(f"--estimate-ngram-lm: lmplz ended with {done.returncode} ({' '.join(last)})")
    return path


def load_pretrained(path: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal model and its tokenizer from a local folder; nothing is downloaded, and no code of the folder is run.

    Raises UsageError when transformers is not installed or the folder holds no causal language model.
    """
    report.require_package("transformers", "--hf-lm", "transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not Path(path).is_dir():
        raise UsageError(f"--hf-lm must be a local folder: {path} does not exist")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        return AutoModelForCausalLM.from_pretrained(path, local_files_only=True).to(device).eval(), tokenizer
    except (OSError, ValueError) as error:
        raise UsageError(f"--hf-lm must hold a causal language model: {path} does not ({error})") from error


def pretrained_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    contexts: Iterable[Sequence[str]],
    samples: Iterable[Sequence[str]],
) -> float:
    """exp of the mean NLL of all tokens of the samples (the model's own tokens of natural text), after their contexts.

    A context is cut at its beginning where it does not fit before the sample; without any, the sample's first
    token is given. Raises UsageError when a sample is longer than the model's positions.
    """
    import torch
    from torch.nn import functional as F

    total, count = 0.0, 0
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None) or sys.maxsize
    for context, sample in map(continuation, contexts, samples):
        before = tokenizer(context)["input_ids"]
        # Some tokenizers put a symbol before a text, which belongs before the context alone.
        after = tokenizer(sample, add_special_tokens=False)["input_ids"]
        if len(after) >= positions:
            raise UsageError(f"--length must fit into the {positions} positions of --hf-lm: got {len(after)} tokens")
        before = before[max(0, len(before) + len(after) - positions) :]
        if not before:
            before, after = after[:1], after[1:]
        ids = torch.tensor([[*before, *after]], device=model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(before) - 1 : -1]
        total += float(F.cross_entropy(logits.float(), ids[0, len(before) :], reduction="sum"))
        count += len(after)
    return math.exp(total / count)


@lru_cache(maxsize=1)
def _detokeniser() -> MosesDetokenizer:
    report.require_package("sacremoses", "--hf-lm", "sacremoses")
    from sacremoses import MosesDetokenizer

    return MosesDetokenizer(lang="en")


def text_of(words: Sequence[str]) -> str:
    """Words and ends of lines as natural text, as it was before tokenisation, a line break for each end."""
    lines = " ".join(words).split(_END)
    return "\n".join(_detokeniser().detokenize(_INSIDE.sub(r"\1", line).split()) for line in lines)


def continuation(context: Sequence[str], sample: Sequence[str]) -> tuple[str, str]:
    """The texts of a context and of what follows it, which begins with the space or sign that joins the two."""
    before, whole = text_of(context), text_of([*context, *sample])
    if whole.startswith(before):
        return before, whole[len(before) :]
    # A quotation mark, say, that only the sample closes: joined by a space then.
    return before, f" {text_of(sample)}"
