"""The one file that a plain loop over the core writes, ``user_dir_examples/plain_pytorch/train.py``; no fairseq."""

# Attributes of every trained model are properties here.
# mypy: disable-error-code="override"

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms import core
from fairseq_ms.core.streaming import StreamingModel
from fairseq_ms.errors import UsageError, bin_hint
from fairseq_ms.tools import tokenizing
from fairseq_ms.tools.trained import Trained, check_finite, lines_of, on_device
from fairseq_ms_pipeline import indexed

# Fields that a training may change when it goes on, beside dropout and the start of weights.
MAY_CHANGE = ("recompute", "checkpoint", "max_positions", "init_residual", "droppath", "reconstruction_loss_weight")


@dataclass(frozen=True)
class Dictionary:
    """A dictionary's symbols, as fairseq's own answers for them."""

    symbols: list[str]

    def __len__(self) -> int:
        return len(self.symbols)

    def bos(self) -> int:
        return indexed.BOS

    def pad(self) -> int:
        return indexed.PAD

    def eos(self) -> int:
        return indexed.EOS


@dataclass
class Plain(Trained):
    """A model that a plain loop trained.

    Attributes:
        saved: what its file holds: "model", its "name", "configuration" and "tokenizer", the "length" of rows, "data",
            and how many tokens at the end of a text were "held_out"
        given: the text or folder that it is asked about, None for what it was trained on
        files: those of its tokenizer, until the process ends
    """

    label: str
    path: str
    model: core.CausalModel
    saved: Mapping[str, Any]
    given: str | None
    adds_bos = False
    files: TemporaryDirectory = field(default_factory=lambda: TemporaryDirectory(prefix="fairseq_ms-"))

    def __post_init__(self) -> None:
        # What reads them may outlive this.
        atexit.register(self.files.cleanup)
        for name, text in self.saved["tokenizer"]["files"].items():
            Path(self.files.name, Path(name).name).write_text(text, encoding="utf-8")

    @property
    def core(self) -> core.CausalModel:
        return self.model

    @property
    def arch(self) -> str:
        return type(self.model).__name__

    @property
    def dictionary(self) -> Dictionary:
        return Dictionary(self.saved["tokenizer"]["symbols"])

    @property
    def streaming(self) -> bool:
        return isinstance(self.model, StreamingModel)

    @property
    def segment(self) -> int:
        return int(self.model.segment_len if isinstance(self.model, StreamingModel) else self.saved["length"])

    @property
    def longest(self) -> int | None:
        return self.model.max_length()

    @property
    def data(self) -> str:
        return str(self.saved["data"] if self.given is None else self.given)

    @property
    def folder(self) -> Path:
        return Path(self.files.name if self.saved["tokenizer"]["files"] else self.data)

    def read(self, source_BT: Tensor, memory: Any = None) -> tuple[Tensor, Any]:
        if isinstance(self.model, StreamingModel):
            return self.model.stream(source_BT, memory)[:2]
        return self.model.features(source_BT), None

    def log_probs(self, features_BTD: Tensor, target_BT: Tensor) -> Tensor:
        logits_BTV = self.model.logits(features_BTD)
        if self.model.adaptive_softmax is not None:
            return logits_BTV
        return F.log_softmax(logits_BTV, dim=-1, dtype=torch.float32)

    def in_segments_of(self, tokens: int) -> None:
        trained = self.model
        try:
            config = replace(trained.config, segment_len=tokens)
        except ValueError as error:
            raise UsageError(f"--tokens-per-sample must be a segment that the model can read: {error}") from error
        self.model = type(trained)(config).to(self.device).eval()
        self.model.load_state_dict(trained.state_dict())

    def lines(self, split: str) -> Sequence[Tensor]:
        """Those of a folder's split, or of a text, which has no splits."""
        place = Path(self.data)
        if place.is_file():
            if split != "test":
                raise UsageError(f"--gen-subset is of prepared folders, and {place} is a text: got {split!r}")
            return lines_of(self._tokens_of(place), indexed.EOS)
        if not (place / "dict.txt").is_file():
            wanted = "the folder bin/ that fairseq-ms prepare wrote, or a text"
            raise UsageError(f"--data must be {wanted}: got {place}{bin_hint(place)}")
        if not (place / f"{split}.idx").is_file():
            raise UsageError(f"--gen-subset must name a split of {place}: there is no {split!r}")
        try:
            if indexed.read_symbols(place / "dict.txt") != self.dictionary.symbols:
                raise UsageError(f"--data {place} has another dictionary than the one {self.path} was trained with")
            tokens = torch.from_numpy(indexed.read_tokens(place / split).astype(np.int64))
        except UsageError:
            raise
        except (ValueError, OSError) as error:
            raise UsageError(f"--data must be as fairseq-ms prepare wrote it: {error}") from error
        return lines_of(tokens, indexed.EOS)

    def pipeline(self) -> tuple[tokenizing.Pipeline, tokenizing.Symbols | tokenizing.FastSymbols]:
        """What a text goes through, and its tokens."""
        pipeline = tokenizing.pipeline_of(self.folder, None, None, None, None)
        return pipeline, tokenizing.Symbols(tokenizing.lines_of(pipeline), self.dictionary.symbols)

    def _tokens_of(self, place: Path) -> Tensor:
        """The tokens of a text; of the one that it was trained on, those that were held out."""
        pipeline, symbols = self.pipeline()
        try:
            text = place.read_bytes()
            if self.given is None:
                text = text[-self.saved["held_out"] :] if self.saved["held_out"] else b""
            # Of a character that was cut in two, the rest is no text.
            known = text.decode("utf-8-sig") if self.given else text.decode("utf-8", "ignore")
        except UnicodeDecodeError as error:
            raise UsageError(f"--data must be UTF-8: {place} is not (byte {error.start})") from error
        lines = StringIO(known, "\n").readlines()
        if pipeline.blank_lines == "drop":
            lines = [line for line in lines if line.strip()]
        if not any(map(str.strip, lines)):
            raise UsageError(f"--data must name a text with words, of which {self.path} has not seen all: got {place}")
        # As preparing it counts them: of byte-level BPE, words are what white space separates.
        tokenised = symbols.lines.tokenised if isinstance(symbols, tokenizing.Symbols) else str
        words = sum(len(tokenised(line).split()) + line.endswith("\n") for line in lines)
        self.counts = {"source_bytes": sum(len(line.encode()) for line in lines), "words_with_eol": words}
        return torch.tensor([token for line in lines for token in symbols.tokens_of(line)])


def built(name: str, settings: Mapping[str, Any]) -> core.CausalModel:
    """A model of the core by the name of its class and the fields of its configuration."""
    model: core.CausalModel = getattr(core, name)(getattr(core, f"{name}Config").from_dict(settings))
    return model


def check_unchanged(then: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raise UsageError where weights of the configuration ``then`` would be another model's ``now``."""
    for name in (name for name in now if name in then):
        before, after = (json.dumps(configuration[name]) for configuration in (then, now))
        if before != after and name not in MAY_CHANGE and not name.endswith(("dropout", "init_std")):
            raise UsageError(
                f"--out must be a new folder, or of the same model: in {folder}, {name} was {before} and is {after}"
            )


def load(label: str, path: str, saved: Mapping[str, Any], data: str | None, cpu: bool) -> Plain:
    """The model of a file's content, which is asked about ``data``; UsageError where it holds none that can be."""
    if data is not None and not Path(data).exists():
        raise UsageError(f"--data must be a folder or a text that exists: got {data}")
    try:
        model = built(saved["name"], saved["configuration"])
        model.load_state_dict(saved["model"])
        symbols, files = saved["tokenizer"]["symbols"], saved["tokenizer"]["files"]
        texts, counts = [*symbols, *files.keys(), *files.values(), saved["data"]], [saved["length"], saved["held_out"]]
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(count, int) for count in counts):
            raise TypeError("symbols, files and data must be text, length and held_out whole numbers")
        if len(symbols) != model.config.vocab_size:
            raise ValueError(f"it has {len(symbols)} symbols for the {model.config.vocab_size} of its model")
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"CHECKPOINT must be as plain_pytorch/train.py writes it: {path} is not ({reason})") from error
    if isinstance(model, core.CoarseLM):
        raise UsageError(f"CHECKPOINT must hold a model that predicts the next token: {path} holds a CoarseLM")
    check_finite(model, path)
    on_device(model, cpu)
    return Plain(label, path, model, saved, data)
