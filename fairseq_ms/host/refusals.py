"""A training that is refused leaves no folder behind, and prints no pages of configuration before its sentence."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer

from fairseq_ms.host.errors import sentence_of
from fairseq_ms.host.wrapping import wrap


class _Log(BufferingHandler):
    """In the place of the root logger's handlers, keeps what they would print until they are back."""

    def __init__(self) -> None:
        super().__init__(capacity=0)
        self.others: list[logging.Handler] | None = None
        self.can_end = False

    def shouldFlush(self, record: logging.LogRecord) -> bool:
        return False

    def hold(self) -> None:
        """Take their place, unless that is done, or nobody would end it."""
        if self.can_end and self.others is None:
            self.others, logging.root.handlers = logging.root.handlers, [self]

    def flush(self) -> None:
        """Give it back to them, and let them print what was kept."""
        if self.others is not None:
            logging.root.handlers, self.others = self.others, None
        kept, self.buffer = self.buffer, []
        for record in kept:
            logging.root.callHandlers(record)


_log = _Log()


def install() -> None:
    """Have fairseq's training do so; calling it again does nothing."""
    wrap(distributed_utils, "call_main", _ending)
    wrap(checkpoint_utils, "verify_checkpoint_directory", _without_a_trace)
    wrap(Trainer, "__init__", _accepted)


def _ending(original: Callable[..., Any], cfg: Any, main: Callable[..., Any], **settings: Any) -> Any:
    """``call_main``, which may run ``main`` in processes of their own."""
    return original(cfg, functools.partial(_run, main), **settings)


def _run(main: Callable[..., Any], cfg: Any, **settings: Any) -> Any:
    """``main``, whose log is shown unless it was refused before there was a trainer."""
    _log.can_end = True
    try:
        return main(cfg, **settings)
    except Exception as error:
        if sentence_of(error) is not None:
            _log.buffer.clear()
        raise
    finally:
        _log.can_end = False
        _log.flush()


def _without_a_trace(original: Callable[..., None], save_dir: str) -> None:
    """``verify_checkpoint_directory``, the last thing before the configuration is printed.

    It makes the folder to try whether that can be done; the first checkpoint makes it again.
    """
    new = [folder for folder in (Path(save_dir), *Path(save_dir).parents) if not folder.exists()]
    original(save_dir)
    with contextlib.suppress(OSError):  # another run's folder may be in it by now
        for folder in new:
            folder.rmdir()
    _log.hold()


def _accepted(original: Callable[..., None], *args: Any, **settings: Any) -> None:
    """``Trainer()``, which comes when task, model, criterion and validation data are there."""
    original(*args, **settings)
    _log.flush()
