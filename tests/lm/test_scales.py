"""Specifications of scales: what is read from the flags, once."""

import re

import pytest

from fairseq_ms.errors import UsageError
from fairseq_ms.lm.scales import Scale, aggregated_scales, layer_scales, retina_scales, single_scale, window_scales
from tests.registry import build, dictionary


def test_layers_are_sorted_from_the_finest_scale_on() -> None:
    assert list(layer_scales("16x=3,1x=5,4x=4")) == [Scale(1, 5), Scale(4, 4), Scale(16, 3)]
    assert single_scale("4x=12") == Scale(4, 12)


def test_the_coarse_scales_share_the_heads_of_the_aggregation() -> None:
    shared = aggregated_scales("16x=8,4x=9,1x=9", None, 12)
    assert list(shared) == [Scale(1, 9), Scale(4, 9), Scale(16, 8)]
    assert [scale.heads for scale in aggregated_scales("16x=8,4x=9,1x=9", "16x=2,4x=10", 12)] == [0, 10, 2]


def test_all_scales_share_the_heads_of_a_retina() -> None:
    shared = retina_scales("1x=0:8,4x=8:256", None, 4)
    assert list(shared) == [Scale(1, near=0, far=8), Scale(4, near=8, far=256)]
    assert [scale.heads for scale in retina_scales("1x=0:8,4x=8:256", "4x=3,1x=1", 4)] == [1, 3]
    assert [scale.near for scale in window_scales("1x=0:128,4x=64:256", overlap=True)] == [0, 64]


@pytest.mark.parametrize(
    ("windows", "heads", "sentence"),
    [
        ("1x=0:8,4x=8:256", "1x=3,2x=2", "^--scale-heads must name"),
        ("1x=0:8,4x=8:256", "1x=3,4x=3", "^--scale-heads must add up"),
        ("1x=0:8,4x=9:256", None, "^--scale-windows must leave no gap"),
        ("1x=0:8,4x=7:256", None, "^--scale-windows must not overlap"),
    ],
)
def test_heads_and_windows_that_break_a_rule_get_one_sentence(windows: str, heads: str | None, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        retina_scales(windows, heads, 5)


@pytest.mark.parametrize("heads", range(3, 20))
def test_the_split_that_the_sentence_shows_is_valid(heads: int) -> None:
    windows = "1x=0:8,4x=8:256,16x=256:512"
    flags = {"scale_windows": windows, "decoder_attention_heads": heads, "decoder_embed_dim": 2 * heads}
    if heads % 3 == 0:
        return
    refused = "--decoder-attention-heads must be a multiple of the 3 scales that share them, unless they are split"
    with pytest.raises(UsageError, match=refused) as error:
        build("retina_lm", flags, dictionary(5))
    shown = re.findall(r"as in (1x=\S+):", str(error.value))
    assert sum(scale.heads for scale in retina_scales(windows, shown[0], heads)) == heads
