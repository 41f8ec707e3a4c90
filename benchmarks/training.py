"""Parity checks of training, shared by the benchmarks of its memory and its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import cast

import torch
from fairseq.models import FairseqLanguageModel
from torch import Tensor, nn

from benchmarks.losses import LOSSES, Loss
from benchmarks.peers import (
    MULTISCALE,
    PAPER,
    TINY,
    Shape,
    build,
    copy_weights,
    evaluation,
    fairseq_lm,
    huggingface_gpt2,
    language_model_loss,
    multiscale,
    random_sample,
)
from benchmarks.runner import Options, ParityError, assert_parity

# Names of contestants and, below, how to build them.
FAIRSEQ, VANILLA, GPT2 = "fairseq transformer_lm", "vanilla", "Hugging Face GPT-2"
# float32 with two layers; logits and gradients relative to the largest, of order 1.
TOLERANCE = 1e-5
# Central differences in float64 with a step of 1e-7: relative.
SLOPE_TOLERANCE = 1e-5


def builders(shape: Shape) -> dict[str, Callable[[], nn.Module]]:
    """Every contestant of the training benchmarks by name; Hugging Face's only where it is installed."""
    models: dict[str, Callable[[], nn.Module]] = {
        FAIRSEQ: lambda: fairseq_lm(shape),
        VANILLA: lambda: build("vanilla_lm", shape, decoder_layers=shape.layers),
        **{name: partial(multiscale, name, shape) for name in MULTISCALE},
    }
    if huggingface_gpt2(replace(TINY, layers=1)) is not None:
        models[GPT2] = lambda: cast(nn.Module, huggingface_gpt2(shape))
    return models


def criterion_of(name: str, options: Options) -> str:
    """That of fairseq's and Hugging Face's models is always fairseq's own."""
    return "cross_entropy" if name in (FAIRSEQ, GPT2) else options.criterion


def shape_of(options: Options) -> Shape:
    """The sizes of the models of the training benchmarks."""
    base = TINY if options.quick else PAPER
    return replace(base, vocabulary=options.vocabulary or base.vocabulary)


def label(name: str, shape: Shape) -> str:
    """The contestant's name with its number of layers, where the name does not have it."""
    return f"{name} {shape.layers}" if name in (FAIRSEQ, VANILLA, GPT2) else name


@cache
def training_parity(criterion: str = "cross_entropy") -> str:
    """Outputs and gradients of every model that is measured, against naive twins, at a small shape.

    ``vanilla_lm`` against fairseq's own model with the same weights; every model with what it computes again
    in backward, and with the criterion, against the same model keeping everything, with ``cross_entropy``; and with
    dropout, gradients against slopes.
    """
    worst = [_against_fairseq()]
    for name in (VANILLA, *MULTISCALE):
        worst.append(_against_keeping_everything(name, LOSSES[criterion]))
        _against_slope(name)
    with_criterion = "" if criterion == "cross_entropy" else " and cross_entropy"
    return (
        f"vanilla equals fairseq's model with the same weights; {len(worst) - 1} models equal themselves with "
        f"--recompute none{with_criterion}, on loss and gradients, to {max(worst):.1e}; gradients with dropout equal "
        "slopes"
    )


def build_ours(name: str, shape: Shape, **flags: object) -> FairseqLanguageModel:
    """One of our contestants with further flags."""
    if name == VANILLA:
        return build("vanilla_lm", shape, decoder_layers=shape.layers, **flags)
    return multiscale(name, shape, **flags)


def _loss_and_gradients(model: nn.Module, loss_of: Loss = language_model_loss) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of(model, random_sample(TINY, 2)) / (2 * TINY.length)
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _against_fairseq() -> float:
    ours, theirs = build("vanilla_lm", TINY, decoder_layers=TINY.layers), fairseq_lm(TINY)
    copy_weights(ours, theirs)
    tokens = random_sample(TINY, 2)["net_input"]["src_tokens"]
    with evaluation(ours, theirs):
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


def _against_keeping_everything(name: str, loss_of: Loss) -> float:
    recomputing, keeping = build_ours(name, TINY), build_ours(name, TINY, recompute="none")
    keeping.load_state_dict(recomputing.state_dict())
    loss, grads = _loss_and_gradients(recomputing, loss_of)
    other_loss, other_grads = _loss_and_gradients(keeping)
    worst = assert_parity(f"loss of {name}", loss, other_loss, TOLERANCE)
    for parameter, grad in other_grads.items():
        worst = max(worst, assert_parity(f"{name}: gradient of {parameter}", grads[parameter], grad, TOLERANCE))
    return worst


def _against_slope(name: str) -> None:
    """The derivative along a random direction, by autograd and by the difference of two losses, same dropout."""
    model = build_ours(name, replace(TINY, dropout=0.1)).double()
    parameters = list(model.parameters())
    direction = [torch.randn_like(parameter) for parameter in parameters]

    def loss() -> Tensor:
        torch.manual_seed(5)
        return language_model_loss_in_double(model)

    grads = torch.autograd.grad(loss(), parameters, allow_unused=True)
    slope = sum(float((grad * towards).sum()) for grad, towards in zip(grads, direction) if grad is not None)
    values = []
    for step in (1e-7, -2e-7):
        with torch.no_grad():
            for parameter, towards in zip(parameters, direction):
                parameter.add_(towards, alpha=step)
        # With gradients enabled, since otherwise attention takes another path, with other masks.
        values.append(float(loss().detach()))
    measured = (values[0] - values[1]) / 2e-7
    if not abs(slope - measured) <= SLOPE_TOLERANCE * max(1.0, abs(measured)):
        raise ParityError(f"{name} with dropout: the derivative along a direction is {slope:.9g}, not {measured:.9g}")


def language_model_loss_in_double(model: nn.Module) -> Tensor:
    """As ``language_model_loss``, without fairseq's conversion of the logits to float32."""
    sample = random_sample(TINY, 2)
    logits = model(**sample["net_input"])[0]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), reduction="mean")
    return loss
