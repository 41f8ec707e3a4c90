"""Perplexity by subword, by word and by byte from one run of fairseq's own evaluation.

A language model's total negative log-likelihood does not depend on what it is divided by. fairseq-eval-lm
divides by subwords; the multi-scale paper (4.1) reports WikiText-103 by dividing by the actual number of
words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import progress_bar
from fairseq_cli.eval_lm import eval_lm
from omegaconf import DictConfig

from fairseq_ms.errors import UsageError

Batch = TypeVar("Batch", bound=Mapping)


@dataclass
class Scored:
    """What the scored targets of an evaluation were.

    targets: all of them. unfinished: those that end in `@@`, so that targets - unfinished is the number of
    words and ends of line. cut: blocks whose last target is unfinished; fairseq-eval-lm --post-process
    '@@ ' counts the word that such a block cuts in two as two words.
    """

    targets: int = 0
    unfinished: int = 0
    cut: int = 0

    @property
    def words(self) -> int:
        """Words and ends of line."""
        return self.targets - self.unfinished


def count_targets(
    batches: Iterable[Batch], dictionary: Dictionary, scored: Scored, bos: bool = False
) -> Iterator[Batch]:
    """Pass batches on unchanged and count in `scored` what fairseq's scorer will score in them.

    With `bos`, the first target of each block is the symbol of --add-bos-token, which is not scored.
    """
    unfinished_V = torch.tensor([symbol.endswith("@@") for symbol in dictionary.symbols])
    for batch in batches:
        if "net_input" in batch:
            target_BT = batch["target"].cpu()
            starts = batch.get("start_indices", [0] * len(target_BT))
            for target_T, start in zip(target_BT, starts, strict=True):
                own = utils.strip_pad(target_T[start + int(bos) :], dictionary.pad())
                unfinished = unfinished_V[own]
                scored.targets += own.numel()
                scored.unfinished += int(unfinished.sum())
                scored.cut += int(unfinished[-1]) if own.numel() else 0
        yield batch


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation was asked, its total negative log-likelihood in bits, and what was scored."""

    data: str
    window: int
    context: int
    bits: float
    scored: Scored


def evaluate(
    path: str, data: str | None, window: int | None, context: int | None, mode: str | None, flags: list[str]
) -> Evaluation:
    """Score a checkpoint as fairseq-eval-lm does.

    data: fairseq's data folder (default: the one trained on). window, context: --tokens-per-sample and
    --context-window (default: as in training, and half of that for models without memory, of running text). mode:
    --sample-break-mode (default: eos if trained so, else none). flags: more of fairseq-eval-lm's. UsageError for
    files that are missing or do not fit each other.
    """
    state = _read(path)
    task = state["cfg"]["task"]
    data = data or task.data
    if not (Path(data) / "dict.txt").is_file():
        raise UsageError(f"--data must be a folder that fairseq-preprocess wrote, with dict.txt in it: got {data}")
    window = window or task.tokens_per_sample
    mode = mode or ("eos" if str(task.sample_break_mode) == "eos" else "none")
    if context is None:
        context = window // 2 if task._name != "streaming_language_modeling" and mode != "eos" else 0
    if not 0 <= context < window:
        raise UsageError(
            f"--context-window must be at least 0 and less than --tokens-per-sample {window}: got {context}"
        )
    # One worker and one shard: every target is scored here, once.
    given = [data, "--path", path, "--task", task._name, "--num-workers", "0", "--sample-break-mode", mode, *flags]
    given += ["--tokens-per-sample", str(window), "--context-window", str(context)]
    bos = bool(getattr(task, "add_bos_token", False))
    given += ["--add-bos-token"] if bos else []
    parser = options.get_eval_lm_parser(default_task=task._name)
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=given))
    scored = Scored()
    try:
        bits = _bits(cfg, state, scored)
    except RuntimeError as error:
        if "size mismatch" in str(error):
            raise UsageError(f"--data {data} has another dictionary than the one {path} was trained with") from None
        raise
    except FileNotFoundError as error:
        raise UsageError(f"--gen-subset must be a split of --data {data}: {error}") from None
    return Evaluation(data, window, context, bits, scored)


def _bits(cfg: DictConfig, state: dict[str, Any], scored: Scored) -> float:
    """The total of the loss (base 2) whose mean fairseq-eval-lm prints, what it is the total of counted in ``scored``.

    The checkpoint is taken out of ``state``, so that what is not evaluated takes no room.

    This is fairseq_cli.eval_lm.main, which returns no counts, around the same scoring. fairseq scores a batch at a
    time here: it adds in single precision, which loses a millionth and more of the total of a whole corpus.
    """
    context = cfg.eval_lm.context_window
    cfg.task.tokens_per_sample -= context
    task = tasks.setup_task(cfg.task)
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([cfg.common_eval.path], task=task, state=state)
    state.clear()
    model = models[0]
    if cfg.common.fp16:
        model.half()
    if torch.cuda.is_available() and not cfg.common.cpu:
        model.cuda()
    model.prepare_for_inference_(cfg)
    task.load_dataset(cfg.dataset.gen_subset)
    batches = task.eval_lm_dataloader(
        dataset=task.dataset(cfg.dataset.gen_subset),
        max_tokens=cfg.dataset.max_tokens or 36000,
        batch_size=cfg.dataset.batch_size,
        max_positions=utils.resolve_max_positions(model.max_positions()),
        num_workers=cfg.dataset.num_workers,
        context_window=context,
    )
    bos = bool(getattr(cfg.task, "add_bos_token", False))
    bits, before = 0.0, 0
    for batch in count_targets(progress_bar.progress_bar(batches), task.source_dictionary, scored, bos):
        results = eval_lm(
            models=[model],
            source_dictionary=task.source_dictionary,
            batch_iterator=[batch],
            target_dictionary=task.target_dictionary,
            softmax_batch=cfg.eval_lm.softmax_batch,
            remove_bos_token=bos,
        )
        bits += float(results["loss"]) * (scored.targets - before)
        before = scored.targets
    return bits


def _read(path: str) -> dict[str, Any]:
    """A checkpoint, with the settings that it was trained with."""
    if not Path(path).is_file():
        raise UsageError(f"the checkpoint must be a file that fairseq-train wrote: got {path}")
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    if not state.get("cfg"):
        raise UsageError(f"the checkpoint must be a file that fairseq-train wrote, with its settings: got {path}")
    return state


def split_counts(manifest: Path, subset: str, targets: int) -> dict[str, int]:
    """A split's counts in the manifest of a prepared folder; UsageError when they are not of the data scored."""
    try:
        splits = json.loads(manifest.read_text(encoding="utf-8"))["splits"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(
            f"--manifest must be a manifest.json that preprocess/ wrote: got {manifest} ({error})"
        ) from None
    if subset not in splits:
        raise UsageError(f"--manifest must hold counts of {subset}: {manifest} has {', '.join(splits)}")
    if splits[subset]["targets"] != targets:
        raise UsageError(
            f"--manifest must be of the data that is scored: {manifest} counts {splits[subset]['targets']} targets "
            f"in {subset}, but {targets} were scored"
        )
    return splits[subset]


def renormalised(bits: float, scored: Scored, counts: dict[str, int]) -> dict[str, float]:
    """The same total of bits divided by targets, words and, as far as `counts` has them, characters and
    bytes.
    """

    def perplexity(count: int) -> float:
        return 2 ** (bits / count) if bits / count < 1000 else math.inf

    result: dict[str, float] = {
        "targets": scored.targets,
        "bits_per_target": bits / scored.targets,
        "perplexity": perplexity(scored.targets),
    }
    if "images" not in counts:
        words = counts.get("words_with_eol", scored.words)
        result |= {"words_with_eol": words, "word_perplexity": perplexity(words)}
    if scored.unfinished:
        result |= {
            "words_cut_by_blocks": scored.cut,
            "fairseq_word_perplexity": perplexity(scored.words + scored.cut),
        }
    for unit, name in (("character", "characters"), ("byte", "bytes"), ("source byte", "source_bytes")):
        if name in counts:
            result[name] = counts[name]
            result[f"bits_per_{unit.replace(' ', '_')}"] = bits / counts[name]
    return result
