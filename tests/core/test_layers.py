"""What layers may be made of: the same properties with rotary positions and none, at any length, and with any part."""

import re
from typing import Any

import pytest
import torch

from fairseq_ms import core
from tests.core.test_model import in_pieces

MODELS = ["Vanilla", "TopDown", "BottomUp", "CoarseLM", "Retina"]
# Positions that were learned would end at 16.
SIZES: dict[str, Any] = {"vocab_size": 11, "dim": 24, "ffn_dim": 32, "heads": 6, "max_positions": 16, "init_std": 0.3}
# Each of them by itself, and all at once.
PARTS: dict[str, dict[str, Any]] = {
    "rms": {"norm": "rms"},
    "post": {"normalize_before": False},
    "qk": {"qk_norm": True},
    "temperature": {"qk_norm": "scaled"},
    "conv": {"short_conv": 3},
    "sinks": {"sinks": True},
    "no_bias": {"bias": False},
    "swiglu": {"activation": "swiglu"},
    "relu_squared": {"activation": "relu_squared"},
    "scaled": {"scale_embedding": True, "init_residual": "scaled"},
}
PARTS["all"] = {name: value for part in PARTS.values() for name, value in part.items()}
PARTS |= {"base": {"rotary_base": 50.0}, "none": {"positions": "none"}, "no_final_norm": {"final_norm": False}}
PARTS |= {"eps": {"norm_eps": 0.1}, "eps_of_heads": {"qk_norm": True, "norm": "rms", "norm_eps": 0.1}}
LAYERS: dict[str, dict[str, Any]] = {
    "Vanilla": {"layers": 2},
    "TopDown": {"scales": (core.Scale(1, 1), core.Scale(2, 1), core.Scale(6, 1))},
    "BottomUp": {"scales": (core.Scale(1, 1), core.Scale(2, 1, heads=4), core.Scale(6, 1, heads=2))},
    "CoarseLM": {"scale": core.Scale(3, 2)},
    "HAED": {
        **{"layers": 2, "head_dim": 4, "separators": (3,), "max_segment_len": 5, "encoder_units": 8},
        **{"decoder": "transformer", "decoder_units": 16, "local_heads": 2, "init_std": 0.3},
    },
    "Retina": {"layers": 2, "scales": (core.Scale(1, far=6, heads=4), core.Scale(3, near=6, far=21, heads=2))},
}

every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str, **changes: Any) -> core.LanguageModel:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"positions": "rotary", **SIZES, **LAYERS.get(name, {}), **changes}
    config = getattr(core, f"{name}Config")(**sizes)
    model = getattr(core, name)(config).double().eval()
    for parameter_name, parameter in model.named_parameters():
        if ".qk." in parameter_name or ".short_conv." in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def test_the_state_of_a_retina_does_not_grow() -> None:
    model, sizes = build("Retina"), set[int]()
    state: Any = model.new_state(1)
    with torch.no_grad():
        for _ in range(60):
            model(torch.randint(11, (1, 50)), state)
            sizes.add(sum(window.buffer.nbytes for cache in state.caches for window in cache.windows))
    assert state.length == 3000
    assert len(sizes) == 1


every_part = pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, part) for name in MODELS for part in PARTS),
        *(("HAED", part) for part in PARTS if "scale_embedding" not in PARTS[part]),
    ],
)


@every_part
def test_a_text_in_pieces_has_the_logits_of_the_whole_with_every_part(name: str, part: str) -> None:
    model, tokens = build(name, **PARTS[part]), torch.randint(11, (2, 41))
    plain = build(name)
    # Longer than the longest of learned positions, which there are none of.
    with torch.no_grad():
        whole, _ = model(tokens)
        assert (whole - plain(tokens)[0]).abs().max() > 1e-3
        torch.testing.assert_close(in_pieces(model, tokens, [7, 1, 20, 1, 12]), whole, rtol=0.0, atol=1e-9)


@every_part
def test_what_is_computed_again_in_backward_changes_no_gradient(name: str, part: str) -> None:
    tokens, results = torch.randint(11, (2, 23)), []
    for recompute in (True, False):
        model = build(name, recompute=recompute, dropout=0.0, attention_dropout=0.0, **PARTS[part]).train()
        loss = model(tokens)[0].logsumexp(-1).sum()
        results.append(torch.autograd.grad(loss, list(model.parameters())))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def numbers(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@every_model
def test_swiglu_has_as_many_weights(name: str) -> None:
    gelu, swiglu = (build(name, activation=activation, ffn_dim=96, bias=False) for activation in ("gelu", "swiglu"))
    assert numbers(gelu) == numbers(swiglu)


def test_no_projection_of_a_layer_has_a_bias_without_them() -> None:
    names = {name for each in MODELS for name in build(each, bias=False).state_dict() if name.endswith("bias")}
    # Norms keep theirs, and so do what pools and what joins two scales.
    assert all(re.search(r"norm\.bias$|join\.", name) for name in names), names
    assert any("attention.out.bias" in name for name in build("Retina").state_dict())


@pytest.mark.parametrize(("start", "factor"), [("normal", 1.0), ("scaled", 6**-0.5), ("zero", 0.0)])
def test_projections_into_the_residual_stream_start_smaller_by_its_depth(start: str, factor: float) -> None:
    # Each of these streams runs through three layers, one of them the aggregation.
    three: dict[str, dict[str, Any]] = {"BottomUp": {"scales": (core.Scale(1, 2), core.Scale(2, 1, heads=6))}}
    three |= {"TopDown": {"scales": (core.Scale(1, 3),)}, "CoarseLM": {"scale": core.Scale(3, 3)}}
    for name in MODELS:
        sizes: dict[str, Any] = {"dim": 96, "ffn_dim": 384, "init_std": 0.02, **three.get(name, {"layers": 3})}
        weights = build(name, init_residual=start, **sizes).state_dict().items()
        stream = [w for n, w in weights if re.search(r"(out|down)\.weight", n) and not n.startswith("coarse")]
        assert len(stream) == 6
        for weight in stream:
            assert weight.std().item() == pytest.approx(0.02 * factor, rel=0.05)
        others = [w for n, w in weights if re.search(r"(qkv|fine|query|up)\.weight", n) and not n.startswith("coarse")]
        for weight in others:
            assert weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_the_gate_of_the_aggregation_starts_closed_and_opens() -> None:
    gated: Any = build("BottomUp", aggregation_gate=True)
    tokens = torch.randint(11, (2, 41))
    gate = gated.aggregate.attention.gate
    said = []
    for opening in (0.0, 1.0):
        torch.nn.init.constant_(gate, opening)
        with torch.no_grad():
            said.append(gated(tokens)[0])
            torch.testing.assert_close(in_pieces(gated, tokens, [7, 1, 20, 13]), said[-1], rtol=0.0, atol=1e-9)
    assert (said[0] - said[1]).abs().max() > 1e-3
    torch.nn.init.zeros_(gate)
    gated.loss(tokens, tokens.roll(-1, 1)).backward()
    assert gate.grad.abs() > 1e-6
    # What is closed adds nothing, whatever it says.
    torch.nn.init.normal_(gated.aggregate.attention.out.weight)
    with torch.no_grad():
        torch.testing.assert_close(gated(tokens)[0], said[0])
