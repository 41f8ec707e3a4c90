"""What the parts of ``haed`` cost: the decoder by its units (HAED, Figure 3c), and the encoders (Section 4.1.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from fairseq.models import FairseqLanguageModel
from torch import Tensor

from benchmarks.haed import TINY, build, loss_of, padded_batch, text_rows
from benchmarks.runner import Contestant, Options, Section, assert_parity
from fairseq_ms.analysis.saved_bytes import saved_bytes

NAME = "haed-parts"
HELP = "haed: time in the decoder by its units, time and memory of an MLP and an LSTM as encoder"

ROWS, WORDS = 4, 256
UNITS = (128, 256, 512, 1024, 2048)
# Of the LSTM encoder: the paper's, and as few as were no worse (docs/claims.md).
PAPERS, SMALL = 1024, 64
# Encodings are sums of about 1,000 terms of order 0.01.
TOLERANCE = 1e-5


@dataclass
class Parts:
    """A training step of a model over rows of words, whole and in part."""

    model: FairseqLanguageModel
    tokens: Tensor
    pad: int

    def whole(self) -> None:
        """Forward and backward."""
        source, target = self.tokens[:, :-1], self.tokens[:, 1:]
        loss_of(self.model(source)[0], target, self.pad).backward()

    def without_decoder(self) -> None:
        """Forward and backward of encoder and main model alone."""
        core = self.model.decoder.core
        chunks = core.segmentation(self.tokens[:, :-1])
        core.main(core.encoder(chunks.tokens_ML), chunks).sum().backward()

    def encodings(self) -> Tensor:
        """Of all chunks, each of the different ones computed once."""
        core = self.model.decoder.core
        encoded: Tensor = core.encoder(core.segmentation(self.tokens[:, :-1]).tokens_ML)
        return encoded

    def encode(self) -> None:
        """Forward and backward of the encoder alone."""
        self.encodings().sum().backward()

    def encoder_bytes(self) -> float:
        return float(saved_bytes(self.encodings, self.model))

    def parity(self) -> str:
        """That the encoder alone gives what it gives chunk by chunk."""
        core = self.model.decoder.core
        chunks_ML = core.segmentation(self.tokens[:, :-1]).tokens_ML
        one_by_one = torch.cat([core.encoder.encode(chunks_ML[row : row + 1]) for row in range(20)])
        worst = assert_parity("encoding", self.encodings()[:20], one_by_one, TOLERANCE)
        return f"chunks encoded together and one by one agree within {worst:.1e}"


def _parts(quick: bool, model: str, flags: dict[str, object]) -> Parts:
    rows, dictionary = text_rows(ROWS if not quick else 1, WORDS if not quick else 40)
    tokens = padded_batch(rows, dictionary)
    sizes = {name: size for name, size in TINY.items() if name not in flags} if quick else {}
    return Parts(build(model, dictionary, tokens.size(1), {**sizes, **flags}), tokens, dictionary.pad())


def sections(options: Options) -> Iterable[Section]:
    """A section for each number of units, and two for the encoders."""
    work = f"{ROWS} rows of {WORDS} words"
    for units in (20, 30) if options.quick else UNITS:
        parts = _parts(options.quick, "haed", {"decoder_units": units})
        yield Section(
            f"haed with a decoder of {units} units, forward and backward, {work}: 1 - ratio is the decoder's share",
            "s",
            [Contestant("whole step", parts.whole), Contestant("without decoder", parts.without_decoder)],
            "whole step",
            parts.parity,
        )

    def recurrent(units: int) -> Parts:
        return _parts(options.quick, "hred", {"main": "transformer", "encoder_units": units})

    name = f"LSTM encoder, {PAPERS} units"
    encoders = {name: recurrent(PAPERS), f"LSTM encoder, {SMALL} units": recurrent(SMALL)}
    encoders["MLP encoder"] = _parts(options.quick, "haed", {})

    def parity() -> str:
        return "; ".join(parts.parity() for parts in encoders.values())

    def contestants(measure: Callable[[Parts], Callable]) -> list[Contestant]:
        return [Contestant(key, measure(parts), 0.5 if "MLP" in key else None) for key, parts in encoders.items()]

    yield Section(
        f"encoder of {work}, forward and backward",
        "s",
        contestants(lambda parts: parts.encode),
        name,
        parity,
    )
    yield Section(
        f"encoder of {work}, bytes kept for backward",
        "MB",
        contestants(lambda parts: parts.encoder_bytes),
        name,
        parity,
        measure="value",
        scale=1e-6,
    )
