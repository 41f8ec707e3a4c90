"""Keeps messages of other libraries off the screen that nobody who uses this package can act on.

Only messages known word for word are silenced, each with the reason; everything else stays visible.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# (category, beginning of the message as a regular expression)
_KNOWN: tuple[tuple[type[Warning], str], ...] = (
    # fairseq builds its configuration through hydra's 1.0 interface in every command.
    (UserWarning, r"hydra\.experimental\.(initialize|compose)\(\) is no longer experimental"),
    (UserWarning, r"\s*The version_base parameter is not specified"),
    (UserWarning, r"In '.*': Usage of deprecated keyword in package header '# @package _group_'"),
    (UserWarning, r"\s*'.*' is validated against ConfigStore schema with the same name"),
    (UserWarning, r"\s*The strict flag in the compose API is deprecated"),
    # fairseq wraps its training step in the old spelling of autocast and scales AMP's gradients with the old
    # spelling of the scaler; both do the same as the new ones.
    (FutureWarning, r"`torch\.cuda\.amp\.(autocast|GradScaler)\(args\.\.\.\)` is deprecated"),
    # fairseq asks for pinned memory whatever the device; without one, torch pins nothing, which is right.
    (UserWarning, r"'pin_memory' argument is set as true but no accelerator is found"),
    # fairseq's own attention (its transformer_lm, trained here for comparison) mixes kinds of masks.
    (UserWarning, r"Support for mismatched key_padding_mask and attn_mask is deprecated"),
)


def silence_known_warnings() -> None:
    """Ignore the warnings listed above; filters that the user sets later come first and win."""
    for category, message in _KNOWN:
        warnings.filterwarnings("ignore", message=message, category=category)
    # fairseq sets the root logger to DEBUG in some of its commands, and hydra then reports its bookkeeping.
    hydra = logging.getLogger("hydra")
    if hydra.level == logging.NOTSET:
        hydra.setLevel(logging.INFO)


@contextmanager
def logging_untouched() -> Iterator[None]:
    """Undo what importing fairseq does to the program's logging.

    Some of its modules configure the root logger, to DEBUG on stderr, when they are imported, and one of them
    then logs that an optional package is missing.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    silent = logging.NullHandler()
    root.addHandler(silent)  # logging.basicConfig does nothing on a logger that has a handler
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
