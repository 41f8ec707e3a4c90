"""What ``haed`` costs: its phases and its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, FairseqLanguageModel
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.device import peak
from benchmarks.table import DTYPES, GB, TIME, Cell, Options, Row, Table, Work, assert_parity, to
from benchmarks.training import step
from fairseq_ms.core.hierarchical.chunks import unique_chunks
from fairseq_ms.data.chunk_sampling import predicted_chunks
from fairseq_ms.models.haed import IEM_CRITERION, SPACE
from fairseq_ms.presets.registry import PRESETS
from fairseq_ms.tools.saved_bytes import saved_bytes

# Rows of a training step on a CPU and on a GPU, the latter as many as Python's documentation has for the first phase.
ROWS, WORDS = {"cpu": 4, "cuda": 56}, 256
TINY = {"encoder_units": 16, "decoder_embed_dim": 24, "position_embed_dim": 8, "decoder_layers": 1}
TINY |= {"decoder_ffn_embed_dim": 32, "decoder_attention_heads": 2, "attention_head_dim": 8, "decoder_units": 20}
# A loss is a mean of about 500 terms of order 5; encodings are sums of about 1,000 terms of order 0.01. In float32.
LOSS_TOLERANCE, ENCODING_TOLERANCE = 1e-4, 1e-5
PADDED, UNPADDED, FIRST = "end to end, padded chunks", "end to end, chunks without padding", "first phase"
UNITS = (128, 256, 512, 1024, 2048)
# Of the LSTM encoder: the paper's, and as few as were no worse (docs/papers/claims.md).
PAPERS, SMALL = 1024, 64


def text_rows(rows: int, words: int, offset: int = 0) -> tuple[list[list[str]], Dictionary]:
    """Rows of characters, each with that many words of Python's own documentation, and all their symbols."""
    from pydoc_data.topics import topics

    everything = " ".join(" ".join(topics.values()).split()).split(" ")
    dictionary = Dictionary()
    for symbol in sorted({*"".join(everything), SPACE}):
        dictionary.add_symbol(symbol)
    picked = [everything[offset + row * words : offset + (row + 1) * words] for row in range(rows)]
    return [list(SPACE.join(row) + SPACE) for row in picked], dictionary


def padded_batch(rows: list[list[str]], dictionary: Dictionary) -> Tensor:
    """(B, T + 1) tokens that begin with the end of a line."""
    ids = [torch.tensor([dictionary.eos(), *(dictionary.index(symbol) for symbol in row)]) for row in rows]
    return nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=dictionary.pad())


def build(model: str, dictionary: Dictionary, positions: int, flags: Mapping[str, object]) -> FairseqLanguageModel:
    """A model with random weights, in training mode."""
    cfg = MODEL_DATACLASS_REGISTRY[model]()
    known = {"tokens_per_sample": positions, "max_target_positions": None, "add_bos_token": False, **flags}
    for name, value in known.items():
        assert hasattr(cfg, name), f"{model} has no flag {name}"
        setattr(cfg, name, value)
    torch.manual_seed(0)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, args=None)
    return MODEL_REGISTRY[model].build_model(cfg, task).train()


def preset(
    arch: str, dictionary: Dictionary, positions: int, quick: bool, criterion: str = "cross_entropy"
) -> FairseqLanguageModel:
    """The model of a preset, or a tiny one like it."""
    model, flags = PRESETS[arch].model, PRESETS[arch].values
    return build(model, dictionary, positions, {**flags, **(TINY if quick else {}), "criterion": criterion})


def loss_of(logits_BTV: Tensor, target_BT: Tensor, pad: int) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten(), ignore_index=pad)


def padded_loss(model: FairseqLanguageModel, tokens: Tensor, pad: int) -> Tensor:
    """The loss by torch's own LSTM over chunks padded to the greatest length, the context beside every token."""
    core, source = model.decoder.core, tokens[:, :-1]
    chunks = core.segmentation(source)
    main_WD = core.main(core.encoder(chunks.tokens_WL), chunks)
    longest = core.segmentation.max_length
    read_ML = source.new_full((main_WD.shape[0], longest), pad)
    target_ML = read_ML.clone()
    read_ML[chunks.decoded_Q, chunks.place_Q] = source.flatten()[chunks.position_Q]
    target_ML[chunks.decoded_Q, chunks.place_Q] = tokens[:, 1:].flatten()[chunks.position_Q]
    context_MLD = main_WD.unsqueeze(1).expand(-1, longest, -1)
    hidden_MLU, _ = core.chunk_decoder.lstm.cell(torch.cat([core.chunk_decoder.embed(read_ML), context_MLD], dim=2))
    return loss_of(core.project(hidden_MLU), target_ML, pad)


class Steps:
    """A training step of the paper's larger model (12 heads, 2,000 decoder units) over rows of words."""

    def __init__(self, kind: str, rows: int, words: int, quick: bool, device: str = "cpu", dtype=torch.float32) -> None:
        lines, dictionary = text_rows(rows, words)
        self.kind, self.pad = kind, dictionary.pad()
        self.tokens = padded_batch(lines, dictionary).to(device)
        further = text_rows(3 * rows, words, offset=rows * words)[0] if kind == FIRST else lines
        self.further = padded_batch(further, dictionary).to(device)
        criterion = IEM_CRITERION if kind == FIRST else "cross_entropy"
        positions = self.tokens.shape[1]
        self.model = preset("haed_wt103_iem", dictionary, positions, quick, criterion).to(device, dtype)

    def loss(self) -> Tensor:
        """Of a step of its kind."""
        if self.kind == PADDED:
            return padded_loss(self.model, self.tokens, self.pad)
        if self.kind == UNPADDED:
            return loss_of(self.model(self.tokens[:, :-1])[0], self.tokens[:, 1:], self.pad)
        candidates = [predicted_chunks(self.model.segmentation, tokens) for tokens in (self.tokens, self.further)]
        candidates_KL, _, counts_K = unique_chunks(torch.cat(candidates))
        found = self.model(self.tokens, candidates_KL, counts_K)
        return found.loss / found.rank_X.numel()


def tables(options: Options) -> list[Table]:
    """A step by phase, the decoder by its units, and the encoders."""
    return [_phases(options), *_parts(options)]


def _rows(options: Options) -> int:
    return 2 if options.quick else ROWS[options.device]


def per_precision(names: tuple[str, ...], work: Callable[..., Work], options: Options) -> list[Row]:
    return [
        Row((name, precision), partial(work, name, precision), precision)
        for precision in options.precisions
        for name in names
    ]


def _phases(options: Options) -> Table:
    rows, words = _rows(options), 24 if options.quick else WORDS

    def work(kind: str, precision: str) -> Work:
        steps = Steps(kind, rows, words, options.quick, options.device, DTYPES[precision])
        run = partial(step, [steps.model], steps.loss)

        def others() -> Mapping[str, Cell]:
            kept = saved_bytes(steps.loss, steps.model) / rows / 1e3
            return {"rows": rows, "kept": kept, "peak": peak(run, options) / GB}

        return Work(run, rows, others)

    def parity() -> str:
        padded, unpadded = (Steps(kind, 2, 24, True) for kind in (PADDED, UNPADDED))
        worst = assert_parity("loss", unpadded.loss(), padded.loss(), LOSS_TOLERANCE)
        return f"chunks with and without padding give one loss, within {worst:.1e}"

    about = (
        f"The presets `*_iem` (12 heads of 32, 2,000 decoder units) on {rows} rows of {words} words of Python's "
        "documentation; the first phase has 3 further batches."
    )
    columns = {"rows": "rows", TIME: "ms a row", "kept": "kept for backward, kB a row", "peak": "peak, GB"}
    ratios = {
        "to padded chunks": lambda settings: to(settings, model=PADDED),
        "to end to end": lambda settings: to(settings, model=UNPADDED),
    }
    lines = per_precision((PADDED, UNPADDED, FIRST), work, options)
    return Table("haed", "HAED, a training step", about, ["step", "precision"], columns, lines, 1e3, ratios, parity)


class Parts:
    """A training step of a model over rows of words, whole and in part."""

    def __init__(self, arch: str, flags: dict[str, object], options: Options, precision: str = "float32") -> None:
        rows, dictionary = text_rows(_rows(options), 40 if options.quick else WORDS)
        tokens = padded_batch(rows, dictionary)
        sizes = {name: size for name, size in TINY.items() if name not in flags} if options.quick else {}
        model = build(arch, dictionary, tokens.size(1), {**sizes, **flags})
        self.model = model.to(options.device, DTYPES[precision])
        self.tokens, self.pad = tokens.to(options.device), dictionary.pad()

    def whole(self) -> Tensor:
        return loss_of(self.model(self.tokens[:, :-1])[0], self.tokens[:, 1:], self.pad)

    def without_decoder(self) -> Tensor:
        core = self.model.decoder.core
        chunks = core.segmentation(self.tokens[:, :-1])
        return core.main(core.encoder(chunks.tokens_WL), chunks).sum()

    def encodings(self) -> Tensor:
        """Of all chunks, each of the different ones computed once."""
        core = self.model.decoder.core
        encoded: Tensor = core.encoder(core.segmentation(self.tokens[:, :-1]).tokens_WL)
        return encoded

    def parity(self) -> float:
        """How far the encoder alone is from what it gives chunk by chunk."""
        core = self.model.decoder.core
        chunks_ML = core.segmentation(self.tokens[:, :-1]).tokens_WL
        one_by_one = torch.cat([core.encoder.encode(chunks_ML[row : row + 1]) for row in range(20)])
        return assert_parity("encoding", self.encodings()[:20], one_by_one, ENCODING_TOLERANCE)


def _parts(options: Options) -> list[Table]:
    whole, without = "whole step", "without decoder"
    encoders: dict[str, tuple[str, dict[str, object]]] = {
        f"LSTM encoder, {units} units": ("hred", {"main": "transformer", "encoder_units": units})
        for units in (PAPERS, SMALL)
    }
    encoders["MLP encoder"] = ("haed", {})
    first = next(iter(encoders))

    def decoding(what: str, units: int, precision: str) -> Work:
        parts = Parts("haed", {"decoder_units": units}, options, precision)
        loss = parts.whole if what == whole else parts.without_decoder
        return Work(partial(step, [parts.model], loss))

    def encoding(name: str, precision: str) -> Work:
        parts = Parts(*encoders[name], options, precision)
        run = partial(step, [parts.model], lambda: parts.encodings().sum())
        return Work(run, 1, lambda: {"kept": saved_bytes(parts.encodings, parts.model) / 1e6})

    def parity() -> str:
        worst = max(Parts(*made, Options(quick=True)).parity() for made in encoders.values())
        return f"chunks encoded together and one by one agree within {worst:.1e}"

    rows = [
        Row((what, str(units), precision), partial(decoding, what, units, precision), f"{units}, {precision}")
        for precision in options.precisions
        for units in ((20, 30) if options.quick else UNITS)
        for what in (whole, without)
    ]
    work = f"Forward and backward over {_rows(options)} rows of {WORDS} words."
    share = f"{work} 1 - ratio is the decoder's share (HAED, Figure 3c)."
    part = Table(
        "haed-parts", "HAED's decoder by its units", share, ["part", "units", "precision"], {TIME: "s"}, rows, 1.0,
        {"to the whole step": lambda settings: to(settings, model=whole)}, parity,
    )  # fmt: skip
    encoder = Table(
        "haed-encoder", "HAED's encoder (Section 4.1.1)", f"{work} The encoder alone.", ["encoder", "precision"],
        {TIME: "s", "kept": "MB kept"}, per_precision(tuple(encoders), encoding, options), 1.0,
        {f"to {first}": lambda settings: to(settings, model=first)}, parity,
    )  # fmt: skip
    return [part, encoder]
