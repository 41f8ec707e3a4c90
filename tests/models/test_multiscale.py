"""The multi-scale models against their definition, and the rules of their flags."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairseq_ms.core.config import ModelConfig
from fairseq_ms.core.joining import Coarser
from fairseq_ms.core.scales import Scale
from fairseq_ms.core.topdown import TopDownScale
from tests.registry import build, dictionary


@pytest.mark.parametrize("pool", ["avg", "max", "conv"])
def test_joining_two_scales_keeps_the_two_inputs_and_nothing_else_for_backward(pool: str) -> None:
    config = ModelConfig(vocab_size=9, dim=8, ffn_dim=16, heads=1)
    scale: Any = TopDownScale(Scale(3, layers=1), 4, config, pool)
    tokens, coarse = torch.randn(2, 30, 8, requires_grad=True), torch.randn(2, 3, 8, requires_grad=True)
    scale.stack = nn.Identity()
    scale.stack.forward = lambda x, *_: x
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scale(tokens, Coarser(coarse))
    assert {tensor.data_ptr() for tensor in kept} == {tokens.data_ptr(), coarse.data_ptr()}


@pytest.mark.parametrize("arch", ["multiscale_topdown", "multiscale_bottomup"])
def test_a_coarse_scale_runs_once_in_as_many_steps_as_its_blocks_have_tokens(arch: str, monkeypatch) -> None:
    flags = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 9, "decoder_attention_heads": 2}
    decoder = build(arch, {**flags, "scale_layers": "8x=1,4x=1,1x=1"}, dictionary(9)).eval().decoder
    core = decoder.core
    scales = core.scales if arch == "multiscale_topdown" else [*core.coarse[::-1], core]
    runs = [0, 0, 0]

    def counted(level: int, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Tensor) -> Tensor:
            runs[level] += 1
            return forward(*args)

        return run

    for level, scale in enumerate(scales):
        monkeypatch.setattr(scale.stack, "forward", counted(level, scale.stack.forward))
    state: dict = {}
    tokens = torch.randint(4, 13, (2, 33))
    with torch.no_grad():
        for end in range(1, 33):
            decoder(tokens[:, :end], incremental_state=state)
    assert runs == [4, 8, 32]
