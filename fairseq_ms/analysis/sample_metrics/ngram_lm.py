"""Perplexity of samples under a Kneser-Ney n-gram model, by kenlm.

Multi-scale Transformer LMs, Section 6.3, Table 5.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from fairseq_ms.analysis import report
from fairseq_ms.errors import UsageError

_LN10 = float(np.log(10.0))


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

    @property
    def order(self) -> int:
        return int(self.model.order)

    def score(self, context: Sequence[str], words: Sequence[str], eos: str = "</s>") -> list[float]:
        """Natural log probability of every word, read after the context.

        ``eos`` ends a sentence, in context and words alike: it is scored as the model's end of sentence, and
        what follows begins a new one. The beginning of the context begins a sentence.
        """
        state, new = self._state(), self._state()
        self.model.BeginSentenceWrite(state)
        scores = []
        for position, word in enumerate([*context, *words]):
            value = self.model.BaseScore(state, "</s>" if word == eos else word, new)
            if position >= len(context):
                scores.append(value * _LN10)
            if word == eos:
                self.model.BeginSentenceWrite(new)
            state, new = new, state
        return scores


def perplexity(model: NGramModel, contexts: Iterable[Sequence[str]], samples: Iterable[Sequence[str]]) -> float:
    """exp of the mean negative log probability of all words of the samples, each after its context."""
    scores = [score for context, words in zip(contexts, samples) for score in model.score(context, words)]
    return float(np.exp(-np.mean(scores)))


def sentences(words: Iterable[str], eos: str = "</s>") -> Iterator[str]:
    """The lines of a text whose lines end in ``eos``, the last one perhaps without."""
    line: list[str] = []
    for word in words:
        if word == eos:
            yield " ".join(line)
            line = []
        else:
            line.append(word)
    if line:
        yield " ".join(line)


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
