"""The harness's model ``fairseq_ms``: a checkpoint of fairseq's, asked about text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from lm_eval.api import registry
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from fairseq_ms.core.sampling import check_finite
from fairseq_ms.errors import UsageError
from fairseq_ms.harness import generation
from fairseq_ms.tools import checkpoints, scoring, tokenizing, trained

Answer = TypeVar("Answer")
_PIPELINE = ("level", "tokenise", "language", "bpe_codes")


@registry.register_model("fairseq_ms")
class FairseqMsLM(LM):
    """A checkpoint with the pipeline that its data went through.

    Args:
        path: file that fairseq-train wrote
        data: folder that fairseq-preprocess wrote (default: the one trained on)
        tokens_per_sample, context_window: the windows in which running text is scored, as in ``fairseq-ms perplexity``
            (default: as in training, and half of that); none for models whose context is their memory
        level, tokenise, language, bpe_codes: the pipeline, where no ``manifest.json`` lies in or above ``data``, as in
            ``fairseq-ms export``; symbols, tokenize: other names of the first two
        batch_size: texts, or windows of one text, in a batch
        device: such as ``cpu`` (default: a CUDA device if there is one)
    """

    def __init__(
        self,
        path: str,
        data: str | None = None,
        tokens_per_sample: int | None = None,
        context_window: int | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        **pipeline: str,
    ) -> None:
        super().__init__()
        spelled = {{"symbols": "level", "tokenize": "tokenise"}.get(name, name): pipeline[name] for name in pipeline}
        if unknown := spelled.keys() - _PIPELINE:
            raise UsageError(f"--model_args of fairseq_ms has no {min(unknown)}: leave it out")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise UsageError(f"--batch_size must be a whole number of at least 1 with fairseq_ms: got {batch_size}")
        self.batch_size = int(batch_size)
        self.checkpoint = checkpoints.load(path, data, cpu=True)
        self.checkpoint.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        of_data = tokenizing.pipeline_of(self.checkpoint.folder, *map(spelled.get, _PIPELINE))
        self.symbols = tokenizing.Symbols(tokenizing.lines_of(of_data), self.checkpoint.dictionary.symbols)
        words, bos = self.checkpoint.dictionary, self.checkpoint.adds_bos
        # A tokenizer's <s> has the text after it, that of --add-bos-token the end of a line.
        self.begin = [words.bos()] * bos + [words.eos()] * (not bos or of_data.level != "hf_tokenizer")
        given = tokens_per_sample if tokens_per_sample is not None else context_window
        self.window: int | None = None
        self.context: int | None = None
        if not self.checkpoint.streaming:
            self.window, self.context = scoring.check_window(self.checkpoint, tokens_per_sample, context_window)
        elif given is not None:
            raise UsageError(
                f"tokens_per_sample and context_window are of models without a memory: {self.checkpoint.label} reads "
                f"a text once, got {given}"
            )

    def tokens(self, text: str) -> Tensor:
        """The tokens (n,) of a text, without a first symbol."""
        return torch.tensor(self.symbols.tokens_of(text), dtype=torch.long)

    def _answered(
        self,
        kind: str,
        requests: Sequence[Instance],
        groups: Iterable[Sequence[int]],
        answer: Callable[[Sequence[int]], Iterable[Answer]],
        silent: bool,
    ) -> list[Answer]:
        """The answers to requests in their order; those of a group, given by indices, are asked batch by batch."""
        results: dict[int, Answer] = {}
        with tqdm(total=len(requests), desc=kind, disable=silent) as bar:
            for group in groups:
                for start in range(0, len(group), self.batch_size):
                    rows = group[start : start + self.batch_size]
                    for row, result in zip(rows, answer(rows), strict=True):
                        results[row] = result
                        self.cache_hook.add_partial(kind, requests[row].args, result)
                    bar.update(len(rows))
        return [results[row] for row in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, all its tokens scored once, with the windows of the model's arguments."""

        def answer(rows: Sequence[int]) -> Iterator[float]:
            texts = [self.tokens(requests[row].args[0]) for row in rows]
            sequences = [tokens for text in texts for tokens in self._sequences(text)]
            scores = np.empty(0)
            if sequences:
                most = self.batch_size * (self.window or max(map(len, sequences)))
                alone = self.begin == [self.checkpoint.dictionary.bos()]
                windows = self.window, self.context, most
                scores = scoring.score_documents(self.checkpoint, sequences, *windows, bos_alone=alone)
            for nll in np.split(scores, np.cumsum([len(text) for text in texts])[:-1]):
                check_finite(bool(np.isfinite(nll).all()))
                yield -float(nll.sum())

        return self._answered("loglikelihood_rolling", requests, [range(len(requests))], answer, disable_tqdm)

    def _sequences(self, tokens: Tensor) -> list[Tensor]:
        """What is scored each on its own: a text, or every line of it if the model was trained on lines."""
        if not self.checkpoint.by_line:
            return [tokens] if tokens.numel() else []
        return trained.lines_of(tokens, self.checkpoint.dictionary.eos())

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation after its context, and whether greedy search would give it.

        What the pipeline makes of the context alone and of both together may differ at the seam, as where a word goes
        on; scored is everything from the first difference on. Raises UsageError where that is nothing.
        """
        pairs = []
        for context, continuation in (request.args for request in requests):
            before, whole = self.tokens(context), self.tokens(context + continuation)
            shared = min(before.numel(), whole.numel())
            differs = (before[:shared] != whole[:shared]).nonzero()
            first = int(differs[0]) if differs.numel() else shared
            if first == whole.numel():
                raise UsageError(
                    f"a continuation must have symbols of the model: got {continuation!r} after {context!r}"
                )
            pairs.append((whole, first))
        order = sorted(range(len(pairs)), key=lambda row: -pairs[row][0].numel())

        def answer(rows: Sequence[int]) -> Iterator[tuple[float, bool]]:
            return self._continuations([pairs[row] for row in rows])

        return self._answered("loglikelihood", requests, [order], answer, disable_tqdm)

    def _continuations(self, pairs: Sequence[tuple[Tensor, int]]) -> Iterator[tuple[float, bool]]:
        """Of tokens, the log-probability of those from an index on, and whether each is the most probable."""
        words, longest, bos = self.checkpoint.dictionary, self.checkpoint.longest, int(self.checkpoint.adds_bos)
        sources, targets, kept = [], [], []
        for whole, first in pairs:
            row = torch.cat([whole.new_tensor(self.begin), whole])
            scored, most = whole.numel() - first, row.numel() - 1 - bos
            cut = 0 if longest is None else max(0, most - longest)
            if cut and scored > most - cut:
                raise UsageError(
                    f"a continuation must have at most the {longest} tokens that {self.checkpoint.label} reads: "
                    f"got {scored}"
                )
            # The first symbol of --add-bos-token stays.
            row = torch.cat([row[:bos], row[bos + cut :]])
            sources.append(row[:-1])
            targets.append(row[1:])
            kept.append(slice(row.numel() - 1 - scored, row.numel() - 1))
        source_BT, target_BT = (pad_sequence(rows, True, words.pad()) for rows in (sources, targets))
        found_BT2 = scoring.score_windows(
            self.checkpoint, source_BT, target_BT, measure=_nll_and_greedy, begun=bool(bos)
        )
        for found_T2, span in zip(found_BT2.double().cpu(), kept, strict=True):
            check_finite(found_T2[span].isfinite().all())
            yield -float(found_T2[span, 0].sum()), bool(found_T2[span, 1].all())

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to a stop string or so many tokens; a long context loses its
        beginning.
        """
        longest, never = self.checkpoint.longest, self.symbols.missing()
        prompts: list[tuple[Tensor, generation.Settings]] = []
        groups: dict[tuple[generation.Settings, int], list[int]] = {}
        for row, request in enumerate(requests):
            asked = generation.settings(request.args[1], longest)
            tokens = self.tokens(request.args[0])
            if longest is not None:
                tokens = tokens[max(0, tokens.numel() + asked.tokens - longest) :]
            prompts.append((torch.cat([tokens.new_tensor(self.begin), tokens]), asked))
            groups.setdefault((asked, tokens.numel()), []).append(row)

        def answer(rows: Sequence[int]) -> list[str]:
            batch = torch.stack([prompts[row][0] for row in rows])
            return generation.continued(self.checkpoint, batch, prompts[rows[0]][1], self.symbols.text_of, never)

        return self._answered("generate_until", requests, groups.values(), answer, disable_tqdm)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness's file of results says about the model."""
        return self.checkpoint.describe()


def _nll_and_greedy(log_probs_1nV: Tensor, targets_1n: Tensor) -> Tensor:
    """The negative log-likelihood of every target and whether it is the most probable (1, n, 2)."""
    greedy_1n = (log_probs_1nV.argmax(-1) == targets_1n).float()
    return torch.stack([scoring.nll(log_probs_1nV, targets_1n), greedy_1n], dim=-1)
