"""Continue a prompt with a checkpoint or an exported model, and print the text as it is written."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import arguments

if TYPE_CHECKING:
    from fairseq_ms.core import CausalModel
    from fairseq_ms.tools.tokenizing import FastSymbols, Pipeline, Symbols

# Unless asked for another number, or where the model has no room for as many.
_TOKENS = 400
# Words at the end of a text that Moses may still change when it sees the next: it joins marks to them.
_UNSETTLED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "file of fairseq-train, or of plain_pytorch/train.py, or folder that fairseq-ms export wrote (default: the "
    help += "model that comes with this package)"
    parser.add_argument("checkpoint", nargs="?", type=arguments.place, metavar="CHECKPOINT", help=help)
    help = "the text to go on with, which may have several lines (default: standard input)"
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help=help)
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="a file with that text")
    help = f"how many tokens to write (default: {_TOKENS}, or as many as the model has positions for)"
    arguments.add_flag(parser, "--max-len-b", "--max-new-tokens", type=arguments.positive, metavar="N", help=help)
    help = "end in front of this text, which may be given several times"
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help=help)
    temperature, top_k = arguments.DRAWN["temperature"], int(arguments.DRAWN["top_k"])
    help = f"logits are divided by it; 0 takes the most probable token (default: {temperature})"
    parser.add_argument("--temperature", type=float, default=temperature, help=help)
    help = f"draw from so many of the most probable tokens; 0 for all (default: {top_k})"
    arguments.add_flag(parser, "--sampling-topk", "--top-k", type=int, default=top_k, metavar="N", help=help)
    help = "draw from the most probable tokens that together have this probability (default: 1)"
    arguments.add_flag(parser, "--sampling-topp", "--top-p", type=float, default=1.0, metavar="P", help=help)
    parser.add_argument("--seed", type=arguments.seed, help="of what is drawn (default: another one every time)")
    arguments.add_data(parser)
    arguments.add_cpu(parser)


@dataclass
class Writer:
    """A model with what turns text into its tokens.

    Attributes:
        begin: the token that a text begins with
        pipeline: that of the data
    """

    core: CausalModel
    symbols: Symbols | FastSymbols
    begin: int
    pipeline: Pipeline


def run(args: argparse.Namespace) -> None:
    """Print the prompt and its continuation."""
    import torch

    from fairseq_ms.core.ops.device import prefer_flash
    from fairseq_ms.export import exported
    from fairseq_ms_pipeline.indexed import BOS, EOS, PAD

    prefer_flash()  # prompts have any length
    if not args.temperature >= 0 or args.sampling_topk < 0 or not 0 < args.sampling_topp <= 1:
        wanted = "--temperature and --sampling-topk must be at least 0, and --sampling-topp above 0 and at most 1"
        raise UsageError(f"{wanted}: got {args.temperature}, {args.sampling_topk} and {args.sampling_topp}")
    if "" in args.stop:
        raise UsageError("--stop must have at least one character: got ''")
    for flag, text in [("--prompt", args.prompt or ""), *(("--stop", text) for text in args.stop)]:
        _decoded(flag, text.encode("utf-8", "surrogateescape"))
    args.checkpoint = args.checkpoint or exported.shipped()
    prompt = _prompt(args)
    writer = _of_folder(args) if Path(args.checkpoint).is_dir() else _of_checkpoint(args)
    core, device = writer.core, next(writer.core.parameters()).device
    if writer.pipeline.blank_lines == "drop":
        # As the data have it, but for where the prompt ends.
        *lines, last = prompt.split("\n")
        prompt = "\n".join([*(line for line in lines if line.strip()), last])
    tokens = [writer.begin, *writer.symbols.tokens_of(prompt)]
    longest = core.max_length()
    room = _TOKENS if longest is None else longest + 1 - len(tokens)
    count = args.max_len_b or max(1, min(_TOKENS, room))
    if longest is not None and count > room:
        raise UsageError(
            f"--prompt and --max-len-b must fit the model's {longest} positions: got {len(tokens)} tokens of a prompt, "
            f"with that which begins a text, and {count} after it"
        )
    generator = torch.Generator(device)
    generator.seed() if args.seed is None else generator.manual_seed(args.seed)
    # Hierarchical models predict every symbol.
    symbols = getattr(core.config, "output_vocab_size", None) or core.config.vocab_size
    allowed = torch.ones(symbols, dtype=torch.bool, device=device)
    # They stand in no text; the end of a line ends none.
    allowed[[BOS, PAD, *writer.symbols.missing()]] = False
    # A model may have room for more symbols than its tokenizer knows.
    allowed[len(writer.symbols.symbols) :] = False
    unsettled = _UNSETTLED if writer.pipeline.tokenise == "moses" else 0
    page = Page(writer.symbols.text_of, EOS, args.stop, unsettled, tokens[1:], writer.symbols.of_bytes)
    page.show()

    def stop(next_B1: torch.Tensor) -> bool:
        page.add(int(next_B1))
        page.show()
        return page.cut is not None

    drawn = args.temperature, args.sampling_topk, args.sampling_topp
    core.generate(
        torch.tensor(tokens, device=device), count, *drawn, generator=generator, graphs=None, allowed=allowed, stop=stop
    )
    page.show(whole=True)
    print()
    if sys.stderr.isatty() and not Path(args.checkpoint).is_dir():
        # Not among the text, which may go to a file.
        print(f"next: fairseq-ms export {shlex.quote(args.checkpoint)} FOLDER", file=sys.stderr)


class Page:
    """A text that grows by tokens, and what is printed of it so far: what no later token changes.

    Args:
        text_of: the text of tokens
        end: the token that ends a line
        stops: what ends a continuation
        unsettled: how many words at the end of a line the next token may change
        prompt: the tokens that it begins with
        of_bytes: tokens of bytes, which become characters together

    Attributes:
        cut: how many characters of the text are in front of a stop string, once there is one
    """

    def __init__(
        self,
        text_of: Callable[[Sequence[int]], str],
        end: int,
        stops: Sequence[str],
        unsettled: int,
        prompt: Sequence[int],
        of_bytes: Collection[int] = (),
    ) -> None:
        self.text_of, self.end, self.stops, self.unsettled = text_of, end, stops, unsettled
        self.of_bytes = of_bytes
        self.before, self.line = "", list[int]()
        self.printed = 0
        self.cut: int | None = None
        for token in prompt:
            self._append(token)
        self.prompt = len(self.text)

    @property
    def text(self) -> str:
        """All of it; a line is undone by itself."""
        return self.before + (self.text_of(self.line) if self.line else "")

    def _append(self, token: int) -> None:
        if token == self.end:
            self.before, self.line = self.text + "\n", []
        else:
            self.line.append(token)

    def add(self, token: int) -> None:
        """Go on with a token."""
        self._append(token)
        # What is a part of a character is none of it yet.
        text = self.text.rstrip("\ufffd")
        found = [place for stop in self.stops if (place := text.find(stop, self.prompt)) >= 0]
        self.cut = min(found, default=None)

    def show(self, whole: bool = False) -> None:
        """Print what has been settled since the last call, or all that is left."""
        text = self.text[: self.cut]
        until = len(text)
        if not whole and self.cut is None:
            words = text[len(self.before) :].split()[-self.unsettled :] if self.unsettled else []
            # A character of several bytes is complete when all of them are there.
            waiting = len(text) - len(text.rstrip("\ufffd"))
            until -= max(sum(map(len, words)) + len(words), waiting, *map(len, self.stops))
            settled = self.line
            while settled and settled[-1] in self.of_bytes:
                settled = settled[:-1]
            if len(settled) < len(self.line):
                until = min(until, len(self.before + self.text_of(settled)))
        if until > self.printed:
            sys.stdout.write(text[self.printed : until])
            sys.stdout.flush()
            self.printed = until


def _prompt(args: argparse.Namespace) -> str:
    """The prompt; a file's last newline ends its last line, which is to be gone on with."""
    if args.prompt is not None:
        return str(args.prompt)
    if args.prompt_file is None and sys.stdin.isatty():
        print("the prompt (Ctrl-D ends it):", file=sys.stderr)
    data = args.prompt_file.read_bytes() if args.prompt_file else sys.stdin.buffer.read()
    # Carriage returns stay, as in prepared data.
    return _decoded("--prompt", data, args.prompt_file or "standard input").removesuffix("\n")


def _decoded(flag: str, data: bytes, source: object = "it") -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} must be UTF-8: {source} is not (byte {error.start})") from None


def _of_checkpoint(args: argparse.Namespace) -> Writer:
    """The model of a checkpoint, with the pipeline of its data."""
    from fairseq_ms.core import CoarseLM
    from fairseq_ms.tools import loading, tokenizing

    checkpoint = loading.load(args.checkpoint, args.data, args.cpu)
    if isinstance(checkpoint.core, CoarseLM):
        raise UsageError(f"CHECKPOINT must hold a model that predicts the next token: {args.checkpoint} is a coarse_lm")
    words = checkpoint.dictionary
    if tokenizing.manifest_of(checkpoint.folder) is None:
        rule = "CHECKPOINT must be of data with a manifest.json, as fairseq-ms prepare writes it"
        raise UsageError(f"{rule}: there is none in or above {checkpoint.folder} (fairseq-interactive needs none)")
    pipeline = tokenizing.pipeline_of(checkpoint.folder, None, None, None, None)
    begin = words.bos() if checkpoint.adds_bos else words.eos()
    symbols = tokenizing.Symbols(tokenizing.lines_of(pipeline), words.symbols)
    return Writer(checkpoint.core, symbols, begin, pipeline)


def _of_folder(args: argparse.Namespace) -> Writer:
    """The model of an exported folder."""
    from fairseq_ms.export import exported, tokenizer

    path = Path(args.checkpoint)
    if not (path / "config.json").is_file():
        arguments.check_checkpoint(args.checkpoint)
    if args.data is not None:
        raise UsageError(f"--data must be left out with an exported folder, which has its dictionary: got {args.data}")
    core, config = exported.read(path, args.cpu)
    pipeline, symbols = tokenizer.of_folder(path, config)
    return Writer(core, symbols, config["begin_token_id"], pipeline)
