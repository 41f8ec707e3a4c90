"""Training steps of the multi-scale models against fairseq's and Hugging Face's, with both losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fairseq.utils import apply_to_sample
from torch import Tensor, nn

from benchmarks.device import peak
from benchmarks.peers import (
    FAIRSEQ,
    GPT2,
    LOSSES,
    MULTISCALE,
    PAPER,
    TINY,
    VANILLA,
    Loss,
    Shape,
    build_model,
    copy_weights,
    fairseq_lm,
    hidden_bytes,
    label,
    language_model_loss,
    random_sample,
)
from benchmarks.table import DTYPES, GB, TIME, Cell, Options, Row, Table, Work, assert_parity, to
from fairseq_ms.tools.saved_bytes import saved_bytes

# Sequences of a step: few on a CPU, and on a GPU as many as the paper's.
ROWS = {"cpu": 2, "cuda": 64}
# float32 with two layers; logits and gradients relative to the largest, of order 1.
TOLERANCE = 1e-5
# Symbols of BookCorpus and of WikiText-103 (Multi-scale Transformer LMs, Table 1); the CPU's tables have fewer.
BOOKS, WIKITEXT, FEW = 31_300, 33_346, 8_000
WIKITEXT_PRESETS = (
    "vanilla_lm_wt103_16",
    "retina_lm_wt103_16",
    "multiscale_topdown_wt103_6_12",
    "multiscale_topdown_wt103_5_10",
    "multiscale_bottomup_wt103_5_10",
)
RECIPES = ("vanilla_lm_tiny", "retina_lm_tiny", "multiscale_topdown_tiny", "multiscale_bottomup_tiny")
COLUMNS = {
    "rows": "rows",
    TIME: "us a target",
    "kept": "kept for backward, kB a target",
    "peak": "peak, GB",
    "peak_per_target": "peak, kB a target",
}


def step(modules: Sequence[nn.Module], loss_of: Callable[[], Tensor]) -> None:
    """Forward and backward; the gradients go at once, so that never more than one model has any."""
    loss_of().backward()
    for module in modules:
        module.zero_grad(set_to_none=True)


def training_work(
    model: nn.Module,
    sample: Mapping[str, Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    options: Options,
    one: Mapping[str, Any] | None = None,
) -> Work:
    """Steps over a sample that has its number of targets as "ntokens"; ``one`` of a single row tells what is kept.

    Raises ValueError on a loss that is not a number.
    """
    few = sample if one is None else one

    def run() -> None:
        step([model], lambda: loss_of(model, sample))

    def others() -> Mapping[str, Cell]:
        with torch.no_grad():
            if not bool(loss_of(model, few).isfinite()):
                raise ValueError("the loss is not finite")
        kept = saved_bytes(lambda: loss_of(model, few), model) + hidden_bytes(loss_of(model, few))
        highest = peak(run, options)
        return {
            "rows": len(sample["target"]),
            "kept": kept / few["ntokens"] / 1e3,
            "peak": highest / GB,
            "peak_per_target": highest / sample["ntokens"] / 1e3,
        }

    return Work(run, sample["ntokens"], others)


def model_work(name: str, shape: Shape, criterion: str, precision: str, options: Options, **flags: object) -> Work:
    """Training steps of a model on random tokens."""
    model = build_model(name, shape, **flags).to(options.device, DTYPES[precision]).train()

    def sample_of(rows: int) -> Any:
        return apply_to_sample(lambda tensor: tensor.to(options.device), random_sample(shape, rows))

    rows = 2 if options.quick else ROWS[options.device]
    return training_work(model, sample_of(rows), LOSSES[criterion], options, sample_of(1))


def tables(options: Options) -> list[Table]:
    """BookCorpus' and WikiText-103's sizes, and those of docs/models.md."""
    books = replace(PAPER, dropout=0.1, vocabulary=BOOKS if options.on_gpu else FEW)
    wikitext = replace(PAPER, dropout=0.1, vocabulary=WIKITEXT, layers=16)
    recipes = Shape(dim=128, ffn_dim=512, heads=4, vocabulary=FEW, layers=6)
    if options.quick:
        books = wikitext = replace(TINY, length=20, dropout=0.1)
        recipes = replace(recipes, length=20, vocabulary=TINY.vocabulary)
    # Sixteen layers take their time at any width.
    presets = WIKITEXT_PRESETS[1:2] if options.quick else WIKITEXT_PRESETS
    names = (FAIRSEQ, GPT2, VANILLA, *MULTISCALE)
    return [
        _table("training", "Training at BookCorpus' sizes", books, names, options),
        _table(
            "wikitext-103", "Training at WikiText-103's sizes", wikitext, (FAIRSEQ, GPT2, VANILLA, *presets), options
        ),
        _table("recipes", "Training at the recipes' sizes", recipes, (FAIRSEQ, GPT2, VANILLA, *RECIPES), options),
    ]


def about(shape: Shape, options: Options) -> str:
    """What a step of these tables is."""
    rows = 2 if options.quick else ROWS[options.device]
    return (
        f"Forward and backward over {rows} sequences, gradients made anew; {shape}. Attention of fairseq's and the "
        "vanilla model is torch's own, dense; fairseq's model has fairseq's `cross_entropy` or our "
        "`linear_cross_entropy`, as ours have."
    )


def _table(name: str, title: str, shape: Shape, models: Sequence[str], options: Options) -> Table:
    rows = [
        Row(
            (label(model, shape), criterion, precision),
            partial(model_work, model, shape, criterion, precision, options),
            precision,
        )
        for precision in options.precisions
        for model in models
        for criterion in LOSSES
        if model != GPT2 or criterion == "cross_entropy"
    ]
    ratios = {
        "to fairseq's": lambda settings: to(settings, model=label(FAIRSEQ, shape)),
        "to vanilla's": lambda settings: to(settings, model=label(VANILLA, shape)),
        "to cross_entropy": lambda settings: to(settings, at1="cross_entropy"),
    }
    settings = ["model", "criterion", "precision"]
    return Table(name, title, about(shape, options), settings, COLUMNS, rows, 1e6, ratios, training_parity)


def training_parity() -> str:
    """Outputs and gradients of every model that is measured, against naive twins, at a small shape.

    ``vanilla_lm`` against fairseq's own model with the same weights; every model with what it computes again in
    backward, and with each criterion, against the same model keeping everything, with ``cross_entropy``.
    """
    worst = [_against_fairseq()]
    for name in (VANILLA, *MULTISCALE):
        worst += [against_keeping_everything(name, loss_of) for loss_of in LOSSES.values()]
    return (
        f"vanilla equals fairseq's model with the same weights; {1 + len(MULTISCALE)} models equal themselves with "
        f"--recompute none and cross_entropy, on loss and gradients, to {max(worst):.1e}"
    )


def _loss_and_gradients(model: nn.Module, loss_of: Loss = language_model_loss) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of(model, random_sample(TINY, 2)) / (2 * TINY.length)
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _against_fairseq() -> float:
    ours, theirs = build_model(VANILLA, TINY), fairseq_lm(TINY)
    copy_weights(ours, theirs)
    tokens = random_sample(TINY, 2)["net_input"]["src_tokens"]
    worst = assert_parity("logits of vanilla and fairseq's model", ours(tokens)[0], theirs(tokens)[0], TOLERANCE)
    our_loss, our_grads = _loss_and_gradients(ours)
    their_loss, their_grads = _loss_and_gradients(theirs)
    worst = max(worst, assert_parity("loss of vanilla and fairseq's model", our_loss, their_loss, TOLERANCE))
    pairs = {
        "decoder.core.embed.words.weight": "decoder.embed_tokens.weight",
        "decoder.core.stack.layers.0.ffn.up.weight": "decoder.layers.0.fc1.weight",
        "decoder.core.stack.layers.0.attention.norm.weight": "decoder.layers.0.self_attn_layer_norm.weight",
        "decoder.core.stack.layers.1.attention.out.weight": "decoder.layers.1.self_attn.out_proj.weight",
    }
    for one, other in pairs.items():
        worst = max(worst, assert_parity(f"gradient of {one}", our_grads[one], their_grads[other], TOLERANCE))
    return worst


def against_keeping_everything(name: str, loss_of: Loss) -> float:
    """The largest difference in loss and gradients to the same model with ``--recompute none`` and cross_entropy."""
    measured, keeping = build_model(name, TINY), build_model(name, TINY, recompute="none")
    keeping.load_state_dict(measured.state_dict())
    loss, grads = _loss_and_gradients(measured, loss_of)
    other_loss, other_grads = _loss_and_gradients(keeping)
    worst = assert_parity(f"loss of {name}", loss, other_loss, TOLERANCE)
    for parameter, grad in other_grads.items():
        worst = max(worst, assert_parity(f"{name}: gradient of {parameter}", grads[parameter], grad, TOLERANCE))
    return worst
