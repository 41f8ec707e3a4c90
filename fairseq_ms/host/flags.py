"""What fairseq's parsers do not know is one sentence with the nearest name, instead of pages of usage."""

from __future__ import annotations

import difflib
import re
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from fairseq import options

from fairseq_ms.host.wrapping import wrap

_CHOICE = re.compile(r"argument (?P<flag>--[\w-]+)\S*: invalid choice: (?P<value>.+?) \(choose from", re.DOTALL)
_UNKNOWN = re.compile(r"unrecognized arguments: .*?(?P<flag>--[^\s=]+)")
# More names than these are not listed.
_FEW = 12
_UNLISTED = "a name that fairseq knows (--help lists them)"


def install() -> None:
    """Have the parsers of fairseq's commands say so; calling it again does nothing."""
    wrap(options, "parse_args_and_arch", _in_one_sentence)


def _in_one_sentence(original: Callable[..., Any], parser: ArgumentParser, *args: Any, **settings: Any) -> Any:
    """``parse_args_and_arch``, whose parser ends the process with exit code 2, as every parser does."""

    def refuse(message: str) -> None:
        parser.exit(2, f"{parser.prog}: error: {sentence_of(message, parser)}\n")

    parser.error = refuse  # type: ignore[assignment, method-assign]
    return original(parser, *args, **settings)


def sentence_of(message: str, parser: ArgumentParser) -> str:
    """What to say instead of a message of the parser's."""
    known = parser._option_string_actions
    choice, unknown = _CHOICE.search(message), _UNKNOWN.search(message)
    if choice and choice["flag"] in known:
        names = sorted(map(str, known[choice["flag"]].choices or ()))
        value = choice["value"].strip("'")
        near = difflib.get_close_matches(value, names, 3)
        some = f"a name that fairseq knows, such as {' or '.join(near)}" if near else _UNLISTED
        rule = f"one of {', '.join(names)}" if len(names) <= _FEW else some
        return f"{choice['flag']} must be {rule}: got {value!r}"
    if not unknown:
        return message
    flag = unknown["flag"]
    if flag == "--decoder-layers" and "--scale-layers" in known:
        return f"{flag} is no flag of this model: --scale-layers says how many layers it has at each scale"
    near = difflib.get_close_matches(flag, known, 1)
    hint = f": did you mean {near[0]}?" if near else " (--help lists those it has)"
    return f"{flag} is no flag of this command and model{hint}"
