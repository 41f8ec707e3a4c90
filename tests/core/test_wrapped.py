"""What wraps a part of a model has its effect: fused operations read weights only where nothing does.

Adapters, quantised layers, parametrizations, pruning and hooks, one part at a time, of every model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.rnn import PackedSequence

from fairseq_ms import core
from fairseq_ms.core.adaptive import TiedLinear
from fairseq_ms.core.joining import Upsample
from fairseq_ms.core.ops.linear import TiedOutput
from fairseq_ms.core.steps import Steps, has_steps
from tests.core.test_model import ADAPTIVE, build

# float64: sums in another order, and what is far from such.
ROUNDING: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
LEAST = 1e-9
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
ROTARY = {"positions": "rotary", "qk_norm": True, "norm": "rms", "normalize_before": False, "activation": "swiglu"}
UNTIED = {"tie_embeddings": False, "bias": False}
SCALES = (core.Scale(1, 1), core.Scale(2, 1, heads=6), core.Scale(4, 1, heads=6))
WINDOWS = (core.Scale(1, near=0, far=4, heads=6), core.Scale(2, near=4, far=16, heads=6))
SEGMENTS: dict[str, Any] = {"segment_len": 8, "mem_len": 4}
CHUNKS: dict[str, Any] = {"separators": (3, 7), "max_segment_len": 5, "dim": 16, "ffn_dim": 16, "position_dim": 4}
CHUNKS |= {"heads": 2, "main_units": 10, "encoder_units": 12, "decoder_units": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("Vanilla", {}),
    "vanilla, rotary": ("Vanilla", {**ROTARY, **UNTIED}),
    "vanilla, adaptive": ("Vanilla", ADAPTIVE),
    "vanilla, adaptive, tied": (
        "Vanilla",
        {**ADAPTIVE, "tie_adaptive_weights": True, "tie_adaptive_projections": True},
    ),
    "coarse": ("CoarseLM", {"scale": core.Scale(3, 1)}),
    "topdown": ("TopDown", {"scales": SCALES, **UNTIED}),
    "topdown, rotary": ("TopDown", {"scales": SCALES, "downsampler": "conv", **ROTARY}),
    "bottomup": ("BottomUp", {"scales": SCALES, "aggregation_gate": True}),
    "bottomup, rotary": ("BottomUp", {"scales": SCALES, "downsampler": "conv", **ROTARY}),
    "retina": ("Retina", {"scales": WINDOWS, "downsampler": "max"}),
    "retina, rotary": ("Retina", {"scales": WINDOWS, "downsampler": "conv", **ROTARY}),
    "transformer-xl": ("TransformerXL", SEGMENTS),
    "transformer-xl, post": ("TransformerXL", {**SEGMENTS, "normalize_before": False, "norm": "rms"}),
    "compressive": ("CompressiveTransformer", {**SEGMENTS, **UNTIED}),
    "compressive, post": ("CompressiveTransformer", {**SEGMENTS, "normalize_before": False}),
    "transformer-ql": ("TransformerQL", {**SEGMENTS, "scales": SCALES[:2], "output_layers": 1}),
    "transformer-ql, no memory": (
        "TransformerQL",
        {**SEGMENTS, "mem_len": 0, "scales": SCALES[:2], "output_layers": 1},
    ),
    "haed": ("HAED", CHUNKS),
    "haed, local": (
        "HAED",
        {**CHUNKS, "decoder": "transformer", "local_heads": 2, "local_layers": 1, "position_dim": 0, **ROTARY},
    ),
    "hred": ("HRED", {**CHUNKS, "position_dim": 0}),
}
every_case = pytest.mark.parametrize("which", CASES)
TOKENS, TARGETS = torch.randint(11, (2, 2, 25), generator=torch.Generator().manual_seed(1)).unbind()


def small(which: str) -> Any:
    name, changes = CASES[which]
    layers = {"layers": 1} if "layers" in getattr(core, f"{name}Config").__dataclass_fields__ else {}
    model = build(name, **{**NO_DROPOUT, **layers, "max_positions": 64, **changes}).double().train()
    for parameter in model.parameters():
        # What begins at zero would hide what is before it.
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All that a model calls to multiply with weights or to look them up."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, TiedOutput | TiedLinear) or (not [*module.children()] and [*module.parameters()])
    ]


def losses(model: Any) -> tuple[Tensor, Tensor]:
    """With gradients, which go backward, and without."""
    model.zero_grad()
    loss = model.loss(TOKENS, TARGETS)
    loss.backward()
    with torch.no_grad():
        return loss.detach(), model.loss(TOKENS, TARGETS)


@torch.no_grad()
def ways(model: Any) -> list[Tensor]:
    """The logits of a text: at once, from caches, and in steps of fixed shapes."""
    state, found = model.new_state(2), [model.eval()(TOKENS)[0]]
    found.append(torch.cat([model(piece, state)[0] for piece in TOKENS.split([9, 2, *[1] * 14], dim=1)], dim=1))
    if has_steps(model):
        state = model.new_state(2)
        begin = model.logits(model.features(TOKENS[:, :9], state))
        steps = Steps(model, 2, 64).begin(state)
        rest = [model.logits(steps(token)) for token in TOKENS[:, 9:].split(1, dim=1)]
        found.append(torch.cat([begin, *rest], dim=1))
    return found


class Adapter(nn.Module):
    """A module as libraries put one in the place of another, which it holds and whose attributes it has not."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.gain = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, *inputs: Any) -> Any:
        result = self.base_layer(*inputs)
        if isinstance(result, Tensor):
            return self.changed(result)
        hidden, states = result  # of an LSTM
        if isinstance(hidden, Tensor):
            return self.changed(hidden), states
        return PackedSequence(self.changed(hidden.data), hidden.batch_sizes), states

    def changed(self, x: Tensor) -> Tensor:
        return x + self.gain * x.roll(1, -1).cos()


@every_case
def test_an_adapter_around_any_part_changes_the_loss_and_is_trained(which: str) -> None:
    model = small(which)
    before, _ = losses(model)
    for name, part in parts(model):
        owner, own = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        adapter = Adapter(part)
        setattr(owner, own, adapter)
        for loss in (found := losses(model)):
            assert (loss - before).abs() > LEAST, name
        torch.testing.assert_close(*found, **ROUNDING, msg=name)
        assert adapter.gain.grad is not None, name
        assert adapter.gain.grad.abs() > LEAST, name
        setattr(owner, own, part)
    assert losses(model)[0].equal(before)
    for name, part in parts(model):
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], Adapter(part))
    whole, *others = ways(model)
    for logits in others:
        torch.testing.assert_close(logits, whole, **ROUNDING)


def own_forward(module: Any, note: Callable[..., None]) -> None:
    """Set a forward pass of the instance's own, which is noted."""
    forward = module.forward

    def noted(*inputs: Any) -> Any:
        note()
        return forward(*inputs)

    module.forward = noted


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward": lambda module, note: module.register_forward_hook(note),
    "before": lambda module, note: module.register_forward_pre_hook(note),
    "backward": lambda module, note: module.register_full_backward_hook(note),
    "before backward": lambda module, note: module.register_full_backward_pre_hook(note),
    "forward of its own": own_forward,
}


@pytest.mark.parametrize(
    ("which", "kind"), [*((which, "forward") for which in CASES), *(("topdown", kind) for kind in HOOKS)]
)
def test_hooks_of_any_part_are_called_and_change_nothing_else(which: str, kind: str) -> None:
    model, called = small(which), list[str]()
    before, whole = losses(model)[0], ways(model)[0]
    expected = [name for name, _ in parts(model)]
    # The one module of modules whose parts are fused without it.
    expected += [name for name, module in model.named_modules() if isinstance(module, Upsample)]
    for name in expected:
        HOOKS[kind](model.get_submodule(name), lambda *_, name=name: called.append(name))
    for loss in losses(model.train()):
        torch.testing.assert_close(loss, before, **ROUNDING)
    assert {*expected} == {*called}
    called.clear()
    for logits in ways(model):
        torch.testing.assert_close(logits, whole, **ROUNDING)
    assert {*expected} == {*called} or "backward" in kind


def test_a_hook_on_a_tied_embedding_changes_no_gradient_that_of_padding_neither() -> None:
    sizes = {"vocab_size": 11, "dim": 8, "ffn_dim": 16, "heads": 2, "layers": 1, "padding_idx": 1}
    model = core.Vanilla(core.VanillaConfig.from_dict(sizes)).double().eval()
    tokens, targets = torch.randint(2, 11, (2, 6)), torch.randint(2, 11, (2, 6))
    gradients: list[Any] = []
    for hooks in (0, 1):
        if hooks:
            model.embed.words.register_forward_hook(lambda *_: None)
        model.zero_grad()
        model.loss(tokens, targets).backward()
        gradients.append(model.embed.words.weight.grad)
    torch.testing.assert_close(*gradients, **ROUNDING)
    assert gradients[0][1].abs().sum() > 0
    assert model.embed.words.padding_idx == 1


@pytest.mark.parametrize("which", ["vanilla", "haed", "transformer-xl"])
@pytest.mark.parametrize(
    "register", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_hooks_of_all_modules_are_called_of_every_part(which: str, register: str) -> None:
    model, called = small(which), set[nn.Module]()
    registered = getattr(torch.nn.modules.module, f"register_module_{register}")
    handle = registered(lambda module, *_: called.add(module))
    try:
        losses(model)
    finally:
        handle.remove()
    # torch has no gradients of what an LSTM returns, tuples of tuples.
    lstms = nn.LSTM if "backward" in register else ()
    assert {part for _, part in parts(model) if not isinstance(part, lstms)} <= called


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


@every_case
def test_parametrized_and_pruned_weights_are_those_that_count(which: str) -> None:
    model = small(which)
    before, _ = losses(model)
    for name, part in parts(model):
        own = "weight_hh_l0" if isinstance(part, nn.LSTM) else "weight"
        # An adaptive softmax knows the weights of its embedding, in the end.
        if isinstance(part, TiedOutput | TiedLinear):
            continue
        parametrize.register_parametrization(part, own, Twice())
        found = losses(model)
        original = part.get_parameter(f"parametrizations.{own}.original")
        for loss in found:
            assert (loss - before).abs() > LEAST, name
        torch.testing.assert_close(*found, **ROUNDING, msg=name)
        assert original.grad is not None, name
        assert original.grad.abs().max() > 0.0, name
        parametrize.remove_parametrizations(part, own, leave_parametrized=False)
        prune.random_unstructured(part, own, amount=0.5)
        masked = getattr(part, f"{own}_mask")
        for _ in range(2):
            # A graph of the last pass would not go backward again.
            pruned = losses(model)
        for loss in pruned:
            assert (loss - before).abs() > LEAST, name
        torch.testing.assert_close(*pruned, **ROUNDING, msg=name)
        original = getattr(part, f"{own}_orig")
        assert not original.grad.masked_select(masked == 0).any() or name.startswith("embed.words.embeddings"), name
        original = original.detach().clone()
        prune.remove(part, own)
        with torch.no_grad():
            getattr(part, own).copy_(original)
    torch.testing.assert_close(losses(model)[0], before)


@every_case
def test_dynamic_quantisation_has_its_effect(which: str) -> None:
    model = small(which).float().eval()
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model))
    kinds = [type(module) for module in quantised.modules()]
    assert nn.Linear not in kinds
    assert nn.LSTM not in kinds
    whole, *others = ways(quantised)
    # Eight bits, of 0.4 %, a few times over.
    difference = (whole - model(TOKENS)[0]).abs().max()
    assert 1e-5 < difference < 0.5 * whole.abs().max()
    # Of a call, all inputs share a scale of eight bits.
    for logits in (quantised(TOKENS)[0], *others):
        torch.testing.assert_close(logits, whole, rtol=0.0, atol=0.2 * float(whole.abs().max()))
