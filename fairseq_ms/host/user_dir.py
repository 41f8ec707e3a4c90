"""A `--user-dir` that is a symlink to this very folder is this package, and no other of its name."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path

from fairseq import utils
from omegaconf import DictConfig

HERE = Path(__file__).resolve().parents[1]


def install() -> None:
    """Have fairseq compare where the folder lies and not how it is spelled; calling it again does nothing.

    fairseq refuses a user directory whose package was imported from another path.
    """
    load = utils.import_user_module
    if getattr(load, "knows_symlinks", False):
        return

    @functools.wraps(load)
    def load_unless_here(args: Namespace | DictConfig) -> None:
        user_dir = getattr(args, "user_dir", None)
        if user_dir is None or Path(user_dir).resolve() != HERE:
            load(args)

    load_unless_here.knows_symlinks = True  # type: ignore[attr-defined]
    utils.import_user_module = load_unless_here
