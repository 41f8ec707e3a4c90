"""``haed`` beside other models of characters: training and generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from benchmarks.device import peak
from benchmarks.haed import build, loss_of, padded_batch, per_precision, preset, text_rows
from benchmarks.table import DTYPES, GB, TIME, Cell, NotInstalledError, Options, Table, Work, assert_parity, to
from benchmarks.training import COLUMNS, training_work

PROMPT, STEPS = 1000, 48
MEGABYTE, PATCH = "MEGABYTE-pytorch", 4
# Cached logits are of order 1, in float32.
TOLERANCE = 1e-4


def tables(options: Options) -> list[Table]:
    """A training step, and generation."""
    return [_characters(options), _generation(options)]


def megabyte(symbols: int, positions: int, quick: bool) -> nn.Module:
    """MEGABYTE-pytorch's model as its README makes one, narrower for as many parameters as ``haed``."""
    try:
        from MEGABYTE_pytorch import MEGABYTE as Megabyte
    except ImportError as error:
        raise NotInstalledError(MEGABYTE) from error
    torch.manual_seed(0)
    made: nn.Module = Megabyte(
        num_tokens=symbols,
        dim=32 if quick else 336,
        depth=(1, 1) if quick else (6, 4),
        max_seq_len=(-(-positions // PATCH), PATCH),
        dim_head=16 if quick else 42,
        heads=2 if quick else 8,
        flash_attn=True,
    )
    return made


def _characters(options: Options) -> Table:
    rows, length = (2, 48) if options.quick else (128 if options.on_gpu else 4, 1048)

    def work(name: str, precision: str) -> Work:
        lines, dictionary = text_rows(rows, 400)
        ids = padded_batch(lines, dictionary)[:, : length + 1].to(options.device)
        symbols = len(dictionary)
        model: nn.Module = preset("haed_wt103", dictionary, length, options.quick)
        if name == MEGABYTE:
            model = megabyte(symbols, length, options.quick)
        model = model.to(options.device, DTYPES[precision]).train()

        def loss(module: nn.Module, sample: dict[str, Any]) -> Tensor:
            target = sample["target"]
            if name == MEGABYTE:
                found: Tensor = module(target, return_loss=True)
                return found
            return loss_of(module(sample["source"])[0], target, dictionary.pad())

        sample = {"source": ids[:, :-1], "target": ids[:, 1:], "ntokens": ids[:, 1:].numel()}
        return training_work(model, sample, loss, options)

    about = (
        f"Models of about 14 million parameters over {rows} rows of {length:,} characters of Python's documentation; "
        f"{MEGABYTE} in its README's proportions."
    )
    ratios = {f"to {MEGABYTE}": lambda settings: to(settings, model=MEGABYTE)}
    lines = per_precision((MEGABYTE, "haed_wt103"), work, options)
    settings = ["model", "precision"]
    return Table("characters", "HAED beside MEGABYTE, a training step", about, settings, COLUMNS, lines, 1e6, ratios)


def _generation(options: Options) -> Table:
    prompt, steps = (40, 8) if options.quick else (PROMPT, STEPS)
    small = {"decoder_layers": 1, "decoder_embed_dim": 24, "decoder_ffn_embed_dim": 32}
    sizes = {"decoder_layers": 8, "decoder_embed_dim": 384, "decoder_ffn_embed_dim": 1536}
    vanilla = {**(small if options.quick else sizes), "decoder_attention_heads": 6, "dropout": 0.0}

    def model(name: str, dictionary: Dictionary, quick: bool) -> nn.Module:
        if name == MEGABYTE:
            return megabyte(len(dictionary), prompt + steps, quick).eval()
        if name == "vanilla_lm":
            made = build("vanilla_lm", dictionary, prompt + steps, vanilla)
        else:
            made = preset("haed_wt103", dictionary, prompt + steps, quick)
        made.eval().make_generation_fast_()
        return made

    @torch.inference_mode()
    def prefilled(made: Any, tokens: Tensor) -> dict[str, object]:
        state: dict[str, object] = {}
        made.decoder(tokens[:, :prompt], incremental_state=state)
        return state

    @torch.inference_mode()
    def continued(made: Any, tokens: Tensor, state: dict[str, object]) -> Tensor:
        ends = range(prompt + 1, prompt + steps + 1)
        return [made.decoder(tokens[:, :end], incremental_state=state)[0] for end in ends][-1]

    def text() -> tuple[Tensor, Dictionary]:
        lines, dictionary = text_rows(1, 400)
        return padded_batch(lines, dictionary)[:, : prompt + steps].to(options.device), dictionary

    def work(name: str, precision: str) -> Work:
        tokens, dictionary = text()
        made = model(name, dictionary, options.quick).to(options.device, DTYPES[precision])
        if name == MEGABYTE:

            @torch.inference_mode()
            def whole() -> None:
                made(tokens[:, :prompt])

            return Work(whole, 1, lambda: {"peak": peak(whole, options) / GB})
        state: list[dict[str, object]] = []

        def before() -> None:
            state[:] = [prefilled(made, tokens)]

        def run() -> None:
            # A mean over whole words, since the steps that end one cost more than the others.
            continued(made, tokens, state[0])

        def others() -> Mapping[str, Cell]:
            return {"peak": peak(lambda: continued(made, tokens, prefilled(made, tokens)), options) / GB}

        return Work(run, steps, others, before)

    def parity() -> str:
        tokens, dictionary = text()
        worst = 0.0
        for name in ("vanilla_lm", "haed"):
            made = model(name, dictionary, quick=True).to(options.device)
            cached = continued(made, tokens, prefilled(made, tokens))
            with torch.inference_mode():
                worst = max(worst, assert_parity(name, cached, made(tokens)[0][:, -1:], TOLERANCE))
        return f"cached logits are those of the whole text, within {worst:.1e}"

    about = (
        f"One row: characters after a prompt of {prompt:,}, models as above and a `vanilla_lm` of 8 layers of 384; "
        f"{MEGABYTE} reads the whole row again for every character."
    )
    ratios = {"to vanilla_lm": lambda settings: to(settings, model="vanilla_lm")}
    columns = {TIME: "ms a character", "peak": "peak, GB"}
    rows = per_precision(("vanilla_lm", "haed", MEGABYTE), work, options)
    title = "HAED beside others, generation"
    return Table("characters-generation", title, about, ["model", "precision"], columns, rows, 1e3, ratios, parity)
