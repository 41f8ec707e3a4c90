"""Flags of `prepare` and of all other commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


class Parser(argparse.ArgumentParser):
    """Takes no empty path, which would be the folder one is in."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("type", Path, lambda text: Path(place(text)))


def place(text: str) -> str:
    """argparse type of paths, which an empty text is not: it would be the folder one is in, or no path at all."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty; . is the folder that you are in")
    return text


def add_flag(parser: argparse._ActionsContainer, name: str, *hidden: str, **settings: Any) -> None:
    """A flag with hidden aliases, its older names and other spellings, which no help shows."""
    flag = parser.add_argument(name, **settings)
    if hidden:
        unseen = {"dest": flag.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(*hidden, **{**settings, **unseen})
