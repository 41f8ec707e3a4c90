"""The multi-scale models against their definition, and the rules of their flags."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fairseq_ms.core.layers import LayerConfig
from fairseq_ms.core.pooling import Coarser, Downsample, Join, right_aligned
from fairseq_ms.errors import UsageError
from tests.registry import build, dictionary


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_joining_two_scales_keeps_the_two_inputs_and_nothing_else_for_backward(pool: str) -> None:
    join, norm, pooling = Join(LayerConfig(dim=8, ffn_dim=16, heads=1), 4), nn.LayerNorm(8), Downsample(pool, 8, 3)
    tokens, coarse = torch.randn(2, 30, 8, requires_grad=True), torch.randn(2, 3, 8, requires_grad=True)
    own = {parameter.data_ptr() for module in (join, norm) for parameter in module.parameters()}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        join(tokens, lambda x: right_aligned(x, pooling), pooling, norm, Coarser(coarse))
    assert {tensor.data_ptr() for tensor in kept} - own == {tokens.data_ptr(), coarse.data_ptr()}


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


@pytest.mark.parametrize(
    ("arch", "flags", "sentence"),
    [
        ("multiscale_topdown", {"scale_layers": "4x=8,6x=2,1x=1"}, "--scale-layers must name scales that divide"),
        ("multiscale_topdown", {"scale_layers": "4x=8"}, "--scale-layers must have an entry for the scale 1x"),
        ("multiscale_topdown", {"scale_layers": "4x=0,1x=1"}, "a whole number of at least 1 for 4x: got '0'"),
        ("multiscale_topdown", {"scale_layers": "7,7,8,8"}, "must be a comma separated list of SCALEx=VALUE"),
        ("multiscale_topdown", {"scale_layers": "4x=1,4x=2,1x=1"}, "must name each scale once: got 4x twice"),
        ("multiscale_bottomup", {"scale_layers": "1x=3"}, "must have a scale beside 1x: got '1x=3'"),
        ("multiscale_bottomup", {"scale_layers": "16x=1,8x=1,4x=1,2x=1,32x=1,1x=1"}, "must be a multiple of the 5"),
        ("multiscale_bottomup", {"scale_heads": "4x=12,16x=12"}, "--scale-heads must add up to .*heads 12"),
        ("multiscale_bottomup", {"scale_heads": "4x=6,1x=6"}, "--scale-heads must name the coarse scales"),
        ("coarse_lm", {"scale_layers": "4x=6,1x=6"}, "must have a single scale such as 4x=12: got '4x=6,1x=6'"),
    ],
)
def test_flags_that_break_a_rule_get_one_sentence(arch: str, flags: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build(arch, flags, dictionary(5))


def test_an_order_of_scales_does_not_matter() -> None:
    models = []
    for text in ("8x=1,2x=2,1x=1", "1x=1,8x=1,2x=2"):
        torch.manual_seed(3)
        flags = {"decoder_embed_dim": 8, "decoder_ffn_embed_dim": 8, "decoder_attention_heads": 2}
        models.append(build("multiscale_topdown", {**flags, "scale_layers": text}, dictionary(5)).eval())
    tokens = torch.randint(4, 9, (2, 13))
    with torch.no_grad():
        assert torch.equal(models[0](tokens)[0], models[1](tokens)[0])
