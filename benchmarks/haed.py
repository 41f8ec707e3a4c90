"""What ``haed`` costs: decoding with and without padding, the first phase, and generation beside other byte models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, FairseqLanguageModel
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import lstm
from benchmarks.runner import Contestant, Options, Section, assert_parity
from fairseq_ms.analysis.saved_bytes import saved_bytes
from fairseq_ms.core.hierarchical.chunks import unique_chunks
from fairseq_ms.data.chunk_sampling import predicted_chunks
from fairseq_ms.lm.registry import PRESETS
from fairseq_ms.models.haed import IEM_CRITERION, SPACE

NAME = "haed"
HELP = "haed: decoder with and without padding, first phase against end to end, generation against other models"

ROWS, WORDS = 4, 256
TINY = {"encoder_units": 16, "decoder_embed_dim": 24, "position_embed_dim": 8, "decoder_layers": 1}
TINY |= {"decoder_ffn_embed_dim": 32, "decoder_attention_heads": 2, "attention_head_dim": 8, "decoder_units": 20}
# A loss is a mean of about 6,000 terms of order 5, cached logits are of order 1; both are in float32.
LOSS_TOLERANCE = 1e-4
LOGIT_TOLERANCE = 1e-4
PROMPT, STEPS = 1000, 48


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
    main_MD = core.main(core.encoder(chunks.tokens_ML), chunks)
    longest = core.segmentation.max_length
    read_ML = source.new_full((main_MD.shape[0], longest), pad)
    target_ML = read_ML.clone()
    read_ML[chunks.decoded_P, chunks.place_P] = source.flatten()[chunks.position_P]
    target_ML[chunks.decoded_P, chunks.place_P] = tokens[:, 1:].flatten()[chunks.position_P]
    context_MLD = main_MD.unsqueeze(1).expand(-1, longest, -1)
    hidden_MLU, _ = core.chunk_decoder.lstm.cell(torch.cat([core.chunk_decoder.embed(read_ML), context_MLD], dim=2))
    return loss_of(core.project(hidden_MLU), target_ML, pad)


@dataclass
class Steps:
    """Training steps of the paper's larger model (12 heads, 2,000 decoder units) on the same words."""

    quick: bool
    rows: int | None = None
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        rows, words = (2, 24) if self.quick else (ROWS, WORDS)
        rows = self.rows or rows
        lines, dictionary = text_rows(rows, words)
        self.pad = dictionary.pad()
        self.tokens = padded_batch(lines, dictionary).to(self.device)
        further = text_rows(3 * rows, words, offset=rows * words)[0]
        self.further = padded_batch(further, dictionary).to(self.device)
        positions = self.tokens.shape[1]
        self.model = preset("haed_wt103_iem", dictionary, positions, self.quick).to(self.device, self.dtype)
        first = preset("haed_wt103_iem", dictionary, positions, self.quick, IEM_CRITERION)
        self.first = first.to(self.device, self.dtype)
        self.title = f"{rows} x {words} words, {int((self.tokens[:, 1:] != self.pad).sum())} characters"

    def unpadded(self) -> Tensor:
        return loss_of(self.model(self.tokens[:, :-1])[0], self.tokens[:, 1:], self.pad)

    def padded(self) -> Tensor:
        return padded_loss(self.model, self.tokens, self.pad)

    def first_phase(self) -> Tensor:
        candidates = [predicted_chunks(self.first.segmentation, tokens) for tokens in (self.tokens, self.further)]
        candidates_KL, _, counts_K = unique_chunks(torch.cat(candidates))
        found = self.first(self.tokens, candidates_KL, counts_K)
        return found.loss / found.rank_N.numel()

    def backward(self, loss: Callable[[], Tensor]) -> None:
        self.model.zero_grad(set_to_none=True)
        self.first.zero_grad(set_to_none=True)
        loss().backward()

    def parity(self) -> str:
        worst = assert_parity("loss", self.unpadded().detach(), self.padded().detach(), LOSS_TOLERANCE)
        return f"chunks with and without padding give one loss, within {worst:.1e}"

    def bytes_kept(self, loss: Callable[[], Tensor]) -> float:
        return float(saved_bytes(loss, self.model, self.first))


class Megabyte:
    """The model of MEGABYTE-pytorch, as its README makes one, narrower for as many parameters as ``haed``."""

    PATCH = 4

    def __init__(self, symbols: int, positions: int, quick: bool) -> None:
        from MEGABYTE_pytorch import MEGABYTE

        torch.manual_seed(0)
        patches = -(-positions // self.PATCH)
        self.model = MEGABYTE(
            num_tokens=symbols,
            dim=32 if quick else 336,
            depth=(1, 1) if quick else (6, 4),
            max_seq_len=(patches, self.PATCH),
            dim_head=16 if quick else 42,
            heads=2 if quick else 8,
            flash_attn=True,
        )

    def loss(self, ids_BT: Tensor) -> Tensor:
        return self.model(ids_BT, return_loss=True)


def megabyte_is_here() -> bool:
    return importlib.util.find_spec("MEGABYTE_pytorch") is not None


class Generation:
    """One row in generation: a prompt of about 1,000 characters, then one cached step a character."""

    def __init__(self, quick: bool, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.prompt, self.steps = (40, 8) if quick else (PROMPT, STEPS)
        lines, dictionary = text_rows(1, 400)
        self.tokens = padded_batch(lines, dictionary)[:, : self.prompt + self.steps].to(device)
        positions = self.prompt + self.steps
        small = {"decoder_layers": 1, "decoder_embed_dim": 24, "decoder_ffn_embed_dim": 32}
        sizes = {"decoder_layers": 8, "decoder_embed_dim": 384, "decoder_ffn_embed_dim": 1536}
        vanilla = {**(small if quick else sizes), "decoder_attention_heads": 6, "dropout": 0.0}
        self.models = {
            "vanilla_lm": build("vanilla_lm", dictionary, positions, vanilla),
            "haed": preset("haed_wt103", dictionary, positions, quick),
        }
        for model in self.models.values():
            model.to(device, dtype).eval().make_generation_fast_()
        self.megabyte = Megabyte(len(dictionary), positions, quick) if megabyte_is_here() else None
        if self.megabyte is not None:
            self.megabyte.model.to(device, dtype)
        counts = {name: sum(p.numel() for p in model.parameters()) for name, model in self.models.items()}
        if self.megabyte is not None:
            counts["MEGABYTE-pytorch"] = sum(p.numel() for p in self.megabyte.model.parameters())
        self.title = ", ".join(f"{name} {count / 1e6:.1f} M" for name, count in counts.items())

    def prefilled(self, name: str) -> dict[str, object]:
        state: dict[str, object] = {}
        with torch.inference_mode():
            self.models[name].decoder(self.tokens[:, : self.prompt], incremental_state=state)
        return state

    def seconds(self, name: str) -> None:
        """Prompt and steps."""
        state = self.prefilled(name)
        with torch.inference_mode():
            for end in range(self.prompt + 1, self.prompt + self.steps + 1):
                self.models[name].decoder(self.tokens[:, :end], incremental_state=state)

    def without_cache(self) -> None:
        """What MEGABYTE-pytorch's ``generate`` does for every byte: the whole text once more."""
        assert self.megabyte is not None
        with torch.inference_mode():
            self.megabyte.model.eval()(self.tokens[:, : self.prompt])

    def parity(self) -> str:
        worst = 0.0
        for name, model in self.models.items():
            state = self.prefilled(name)
            with torch.inference_mode():
                for end in range(self.prompt + 1, self.prompt + self.steps + 1):
                    cached = model.decoder(self.tokens[:, :end], incremental_state=state)[0]
                whole = model(self.tokens)[0][:, -1:]
            worst = max(worst, assert_parity(name, cached, whole, LOGIT_TOLERANCE))
        return f"cached logits are those of the whole text, within {worst:.1e}"


def _per_step(generation: Generation, name: str) -> Callable[[], float]:
    """Seconds a cached step, the prompt not counted: the mean over the steps."""
    import time

    def run() -> float:
        state = generation.prefilled(name)
        marks = [time.perf_counter()]
        with torch.inference_mode():
            for end in range(generation.prompt + 1, generation.prompt + generation.steps + 1):
                generation.models[name].decoder(generation.tokens[:, :end], incremental_state=state)
                marks.append(time.perf_counter())
        # A mean over whole words, since the steps that end one cost more than the others.
        return sum(later - earlier for earlier, later in pairwise(marks)) / generation.steps

    return run


def sections(options: Options) -> Iterable[Section]:
    """Steps and bytes of training, its LSTM by itself, generation, and MEGABYTE-pytorch where it is installed."""
    yield from _steps(options)
    yield from lstm.sections(options)
    yield from _generation(options)
    if megabyte_is_here():
        yield from _training(options)


def _steps(options: Options) -> Iterable[Section]:
    """The decoder with and without padding, and the first phase."""
    steps = Steps(options.quick)
    yield Section(
        f"haed, forward and backward, {steps.title}",
        "s",
        [
            Contestant("padded chunks", lambda: steps.backward(steps.padded)),
            Contestant("chunks without padding", lambda: steps.backward(steps.unpadded), 0.75),
        ],
        "padded chunks",
        steps.parity,
    )
    yield Section(
        f"haed, bytes kept for backward, {steps.title}",
        "MB",
        [
            Contestant("padded chunks", lambda: steps.bytes_kept(steps.padded)),
            Contestant("chunks without padding", lambda: steps.bytes_kept(steps.unpadded), 0.35),
            Contestant("first phase", lambda: steps.bytes_kept(steps.first_phase)),
        ],
        "padded chunks",
        steps.parity,
        measure="value",
        scale=1e-6,
    )
    yield Section(
        f"haed, first phase against end to end, forward and backward, {steps.title}",
        "s",
        [
            Contestant("end to end", lambda: steps.backward(steps.unpadded)),
            Contestant("first phase", lambda: steps.backward(steps.first_phase), 0.1),
        ],
        "end to end",
        steps.parity,
    )


def _generation(options: Options) -> Iterable[Section]:
    """Cached steps of ``haed`` and of a ``vanilla_lm`` over characters, and whole passes of MEGABYTE-pytorch."""
    generation = Generation(options.quick)
    yield Section(
        f"a character of generation after {generation.prompt}, one row ({generation.title})",
        "ms",
        [
            Contestant("vanilla_lm", _per_step(generation, "vanilla_lm")),
            Contestant("haed", _per_step(generation, "haed"), 0.25),
        ],
        "vanilla_lm",
        generation.parity,
        measure="value",
        scale=1e3,
    )
    if generation.megabyte is None:
        return
    yield Section(
        f"{generation.steps} characters of haed and 1 of MEGABYTE-pytorch behind a prompt of {generation.prompt}",
        "s",
        [
            Contestant("MEGABYTE-pytorch, 1 byte", generation.without_cache),
            Contestant(f"haed, prompt and {generation.steps} bytes", lambda: generation.seconds("haed")),
        ],
        "MEGABYTE-pytorch, 1 byte",
        generation.parity,
    )


def _training(options: Options) -> Iterable[Section]:
    """A step of ``haed`` and of MEGABYTE-pytorch over the same characters, as many rows of one length."""
    rows, positions = (2, 48) if options.quick else (4, 1048)
    lines, dictionary = text_rows(rows, 400)
    tokens = padded_batch(lines, dictionary)[:, : positions + 1]
    model = preset("haed_wt103", dictionary, positions, options.quick)
    other = Megabyte(len(dictionary), positions, options.quick)

    def ours() -> None:
        model.zero_grad(set_to_none=True)
        loss_of(model(tokens[:, :-1])[0], tokens[:, 1:], dictionary.pad()).backward()

    def theirs() -> None:
        other.model.zero_grad(set_to_none=True)
        other.loss(tokens[:, 1:]).backward()

    def parity() -> str:
        ours()
        theirs()
        return "nothing to compare: two different models"

    yield Section(
        f"forward and backward over {rows} x {positions} characters",
        "us a character",
        [Contestant("MEGABYTE-pytorch", theirs), Contestant("haed", ours, 1 / 1.1)],
        "MEGABYTE-pytorch",
        parity,
        scale=1e6 / tokens[:, 1:].numel(),
    )
