"""One layer at several scales against the length of the sequence (Figure 2)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.runner import Contestant, Options, Section, assert_parity
from fairseq_ms.analysis.saved_bytes import saved_bytes
from fairseq_ms.core.layers import LayerConfig, TransformerLayer

NAME = "layer-scaling"
HELP = "memory and time of one layer at 1x, 4x, 16x and 64x against the length of the sequence (Figure 2)"

FACTORS = (1, 4, 16, 64)
# float32, one layer: relative to values and gradients of order 1.
TOLERANCE = 1e-5


def sections(options: Options) -> Iterable[Section]:
    """Time and bytes of a layer over a sequence pooled by each factor, at every length."""
    dim, ffn_dim = (48, 96) if options.quick else (768, 3072)
    lengths = (128, 256) if options.quick else (512, 1024, 2048, 4096)
    torch.manual_seed(0)
    layer = TransformerLayer(LayerConfig(dim=dim, ffn_dim=ffn_dim, heads=12))
    for length in lengths:
        inputs = {factor: torch.randn(1, length // factor, dim, requires_grad=True) for factor in FACTORS}
        shape = f"T={length}, d={dim}, FFN {ffn_dim}, 12 heads, batch 1, no dropout, float32"

        def parity(inputs: dict[int, Tensor] = inputs) -> str:
            return _parity(layer, inputs)

        yield Section(
            f"one layer, forward and backward, {shape}",
            "ms",
            [Contestant(f"{f}x", lambda x=x: layer(x).sum().backward()) for f, x in inputs.items()],
            "1x",
            parity,
            scale=1e3,
        )
        yield Section(
            f"bytes one layer keeps for backward, {shape}",
            "bytes",
            [Contestant(f"{f}x", lambda x=x: saved_bytes(lambda: layer(x), layer)) for f, x in inputs.items()],
            "1x",
            parity,
            measure="value",
        )


def _parity(layer: TransformerLayer, inputs: dict[int, Tensor]) -> str:
    """The layer against the same one keeping everything, output and gradient of the input."""
    dim, ffn_dim = layer.attention.norm.normalized_shape[0], layer.ffn.up.out_features
    plain = TransformerLayer(LayerConfig(dim=dim, ffn_dim=ffn_dim, heads=12, recompute=False))
    plain.load_state_dict(layer.state_dict())
    worst = 0.0
    for factor, x in inputs.items():
        weights = torch.linspace(-1.0, 1.0, x.numel()).view_as(x)
        results = []
        for module in (layer, plain):
            y = module(x)
            results.append([y.detach(), torch.autograd.grad((y * weights).sum(), [x])[0]])
        for name, one, other in zip(("output", "gradient"), *results, strict=True):
            worst = max(worst, assert_parity(f"{factor}x: {name}", one, other, TOLERANCE))
    return f"equals the layer that keeps everything, output and gradient, to {worst:.1e}"
