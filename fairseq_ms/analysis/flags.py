"""Flags that take a count, written in one line each."""

from __future__ import annotations

import argparse
from typing import Any

from fairseq_ms.analysis import arguments


def add_counts(parser: argparse.ArgumentParser, *flags: tuple[str, int | None, str]) -> None:
    """Flags of whole numbers from 1: name, default and help, to which a default that is a number is added.

    Behind a name and a space follow other names that stand for it and that no help shows.
    """
    for names, default, text in flags:
        name, *hidden = names.split()
        help = text if default is None else f"{text} (default: {default})"
        settings: dict[str, Any] = {"type": arguments.positive, "default": default, "metavar": "N", "help": help}
        if hidden:
            arguments.add_flag(parser, name, *hidden, **settings)
        else:
            parser.add_argument(name, **settings)
