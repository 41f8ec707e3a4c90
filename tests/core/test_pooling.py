"""Pooling and unfolding against torch's own, and the projections that stand for convolutions."""

import pytest
import torch
from torch import nn

from fairseq_ms.core.pooling import Upsample, right_aligned
from fairseq_ms.core.scales import Downsample


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_the_convolutional_downsampler_is_a_strided_convolution(factor: int) -> None:
    ours = Downsample("conv", 5, factor).double()
    theirs = nn.Conv1d(5, 5, factor, stride=factor).double()
    assert ours.conv is not None
    assert theirs.bias is not None
    x = torch.randn(2, 6 * factor, 5, dtype=torch.float64)
    with torch.no_grad():
        # (O, k * I) with the positions of a block one after the other -> (O, I, k)
        theirs.weight.copy_(ours.conv.weight.unflatten(1, (factor, 5)).transpose(1, 2))
        theirs.bias.copy_(ours.conv.bias)
        # float64, the same products in another order.
        torch.testing.assert_close(ours(x), theirs(x.transpose(1, 2)).transpose(1, 2), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize(("kind", "pool"), [("avg", nn.AvgPool1d), ("max", nn.MaxPool1d)])
def test_the_other_downsamplers_are_torchs_pooling(kind: str, pool: type[nn.Module]) -> None:
    x = torch.randn(2, 12, 5, dtype=torch.float64)
    expected = pool(3)(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(Downsample(kind, 5, 3)(x), expected, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_the_upsampler_is_a_transposed_convolution(factor: int) -> None:
    ours = Upsample(5, factor).double()
    theirs = nn.ConvTranspose1d(5, 5, factor, stride=factor).double()
    assert theirs.bias is not None
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    with torch.no_grad():
        nn.init.normal_(ours.bias)
        # (k * O, I) with the outputs of a position one after the other -> (I, O, k)
        theirs.weight.copy_(ours.conv.weight.unflatten(0, (factor, 5)).permute(2, 1, 0))
        theirs.bias.copy_(ours.bias)
        torch.testing.assert_close(ours(x), theirs(x.transpose(1, 2)).transpose(1, 2), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("kind", ["avg", "max", "conv"])
@pytest.mark.parametrize("cut", [1, 4, 5, 8, 11])
def test_right_aligned_blocks_of_a_text_in_two_pieces_are_those_of_the_whole(kind: str, cut: int) -> None:
    pool, x = Downsample(kind, 5, 4).double(), torch.randn(2, 19, 5, dtype=torch.float64)
    before = torch.cat([x.new_full((2, 5, 5), pool.padding), x[:, :cut]], dim=1)
    with torch.no_grad():
        parts = [right_aligned(x[:, :cut], pool), right_aligned(x[:, cut:], pool, cut, before)]
        torch.testing.assert_close(torch.cat(parts, dim=1), right_aligned(x, pool), rtol=0.0, atol=1e-12)
