"""What a person who trains looks at: one bar over all updates, or a line now and then, and what to know first."""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import fairseq_cli.train
import torch
from fairseq import checkpoint_utils
from fairseq.distributed.utils import get_global_rank
from fairseq.logging import progress_bar
from tqdm import tqdm

from fairseq_ms.host import saving

logger = logging.getLogger(__name__)

# Seconds between two lines where no bar can be drawn, and of how many updates the loss is about a mean.
_PAUSE, _MEAN = 10.0, 20
# Passes over a text above which a small model begins to know it by heart.
PASSES = 4
# A validation without improvement for so much of the run is worth a sentence.
_WITHOUT_PROGRESS = 0.25


class Screen:
    """The state of a run in one line, and sentences above it; of several processes, the first one has it.

    Attributes:
        total: updates of the run
        at, began: updates made, and before this process
        loss, valid: of training, about a mean, and of the last validation, in bits a token; None before there is one
    """

    def __init__(self) -> None:
        self.total, self.at, self.began, self.unit = 0, 0, 0, "token"
        self.loss: float | None = None
        self.valid: float | None = None
        self.best, self.best_at, self.told = math.inf, 0, False
        self.started = self.shown = time.monotonic()
        self.bar: tqdm | None = None
        self.silent = False

    def begin(self, total: int, at: int, best: float, sentences: list[str]) -> None:
        """Say what is to be known first and draw an empty bar, ``at`` updates from the beginning."""
        self.total, self.at, self.began, self.best, self.best_at = total, at, at, best, at
        for sentence in sentences:
            logger.info(sentence)
        self.started = self.shown = time.monotonic()
        self.silent = get_global_rank() > 0
        if sys.stderr.isatty() and not self.silent:
            self.bar = tqdm(total=total, initial=at, bar_format="{desc} |{bar}|", desc=self.line())

    def line(self) -> str:
        """Where the run is."""
        made = self.at - self.began
        parts = [f"update {self.at:,} of {self.total:,}"]
        parts += [f"loss {self.loss:.2f} bits a {self.unit}"] if self.loss is not None else []
        parts += [f"valid {self.valid:.2f}"] if self.valid is not None else []
        if made:
            parts.append(f"{_length((time.monotonic() - self.started) / made * (self.total - self.at))} left")
        return ", ".join(parts)

    def update(self, at: int, loss: float | None) -> None:
        """An update is made."""
        if loss is not None:
            weight = max(1 / _MEAN, 1 / max(1, at - self.began))
            self.loss = loss if self.loss is None else self.loss + weight * (loss - self.loss)
        self.at = at
        self._show(done=at >= self.total)

    def validated(self, found: float, maximize: bool = False) -> None:
        """A validation has found this; the training has not gained for long when it says so."""
        self.valid = found
        if found > self.best if maximize else found < self.best:
            self.best, self.best_at, self.told = found, self.at, False
        elif not self.told and self.at - self.best_at >= _WITHOUT_PROGRESS * self.total:
            logger.info(f"validation has not improved since update {self.best_at:,}, the best; Ctrl-C keeps that one")
            self.told = True
        self._show()

    def _show(self, done: bool = False) -> None:
        if self.bar is not None:
            self.bar.set_description_str(self.line(), refresh=False)
            self.bar.update(self.at - self.bar.n)
        elif not self.silent and (done or time.monotonic() - self.shown >= _PAUSE):
            print(self.line(), flush=True)
            self.shown = time.monotonic()

    def end(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()


def _length(seconds: float) -> str:
    """A time to read: 40 s, 8 min or 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


screens: list[Screen] = []
"""That of the run in this process, if it has one."""


@contextmanager
def shown() -> Iterator[None]:
    """A screen for the run in this process."""
    screen = Screen()
    program = fairseq_cli.train
    ending = functools.partial(validate_all, program.validate_and_save, program.validate, screen)
    with (
        patch.object(program, "Trainer", _telling(program.Trainer, screen)),
        patch.object(program, "validate", functools.partial(validate, program.validate, screen)),
        patch.object(program, "validate_and_save", ending),
    ):
        screens.append(screen)
        try:
            yield
        finally:
            screens.pop()
            screen.end()


def _telling(trainer: type, screen: Screen) -> type:
    """A trainer that tells the screen of what it does."""

    class Shown(trainer):
        begun = False

        def begin_epoch(self, epoch: int) -> None:
            super().begin_epoch(epoch)
            if not self.begun:
                self.begun = True
                total, sentences = first_words(self, self.iterator)
                worst = -math.inf if self.cfg.checkpoint.maximize_best_checkpoint_metric else math.inf
                best = getattr(checkpoint_utils.save_checkpoint, "best", worst)
                screen.unit = "chunk" if self.cfg.criterion._name == "in_batch_sampled_softmax" else "token"
                screen.begin(total, self.get_num_updates(), best, sentences)

        def get_train_iterator(self, epoch: int, *args: Any, **more: Any) -> Any:
            self.iterator = super().get_train_iterator(epoch, *args, **more)
            return self.iterator

        def train_step(self, samples: list[Any], raise_oom: bool = False) -> Any:
            logged = super().train_step(samples, raise_oom)
            screen.update(self.get_num_updates(), (logged or {}).get("loss"))
            return logged

    return Shown


def first_words(trainer: Any, iterator: Any) -> tuple[int, list[str]]:
    """How many updates the run has, and what its model, device and data are, with a warning above ``PASSES`` passes."""
    cfg = trainer.cfg
    group = trainer.data_parallel_world_size * cfg.optimization.update_freq[0]
    an_epoch = max(1, -(-len(iterator.frozen_batches) // group))
    tokens = sum(int(iterator.dataset.num_tokens(row)) for batch in iterator.frozen_batches for row in batch)
    limits = cfg.optimization.max_update, an_epoch * cfg.optimization.max_epoch
    total = int(min((limit for limit in limits if limit > 0), default=an_epoch))
    model, device = trainer.get_model(), trainer.device
    count = torch.get_num_threads()
    threads = f"the CPU with {count} thread{'s' * (count > 1)}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    if (processes := trainer.data_parallel_world_size) > 1:
        where = f"{processes} processes, each with {where}"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    passes, dropout = total / an_epoch, getattr(cfg.model, "dropout", 0)
    words = [
        f"{cfg.model._name}: {parameters:,} parameters, on {where}; {tokens // an_epoch:,} tokens an update; "
        f"{total:,} updates are {passes:.1f} passes over {tokens:,} tokens"
    ]
    if passes > PASSES:
        words.append(
            f"above {PASSES} passes a model begins to know its text by heart; what helps: more text, "
            f"--max-update {PASSES * an_epoch}, or a model.dropout above {dropout:g}"
        )
    return total, words


def validate(
    original: Callable[..., Any], screen: Screen, cfg: Any, trainer: Any, task: Any, epoch_itr: Any, subsets: list[str]
) -> Any:
    """``validate``, of which the screen is told."""
    losses = original(cfg, trainer, task, epoch_itr, subsets)
    screen.validated(losses[0], cfg.checkpoint.maximize_best_checkpoint_metric)
    return losses


def validate_all(
    original: Callable[..., Any],
    validated: Callable[..., Any],
    screen: Screen,
    cfg: Any,
    trainer: Any,
    task: Any,
    epoch_itr: Any,
    subsets: list[str],
    end_of_epoch: bool,
) -> Any:
    """``validate_and_save``; where that was the last, all of the data follow the part that was compared."""
    losses, should_stop = original(cfg, trainer, task, epoch_itr, subsets, end_of_epoch)
    last = should_stop or saving.ends_last_epoch(cfg, epoch_itr, end_of_epoch)
    if last and losses[0] is not None and trainer.valid_tokens is not None:
        # Once more the same update, which a file of curves has already.
        with patch.object(progress_bar.logger, "disabled", True), patch.object(trainer, "valid_tokens", None):
            every = validated(cfg, trainer, task, epoch_itr, subsets)
        logger.info(f"validated on all of {subsets[0]}: {said(cfg, every[0], screen.unit)}")
    return losses, should_stop


def said(cfg: Any, found: float, unit: str) -> str:
    """What a validation has found: a loss in bits, with the perplexity of one that is not smoothed, or its metric."""
    metric = cfg.checkpoint.best_checkpoint_metric
    if metric not in ("loss", "nll_loss"):
        return f"{metric} {found:.3f}"
    smoothed = metric == "loss" and getattr(cfg.criterion, "label_smoothing", 0)
    # Others are beyond floating point numbers.
    perplexity = f", {2**found:.2f} perplexity" if not smoothed and found < 1000 else ""
    return f"{found:.3f} bits a {unit}{', smoothed' if smoothed else ''}{perplexity}"
