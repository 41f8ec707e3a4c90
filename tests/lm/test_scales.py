"""Specifications of scales: what is read from the flags, once."""

import re

import pytest

from fairseq_ms.errors import UsageError
from fairseq_ms.lm.scales import Scale, layer_scales, window_scales, with_heads
from tests.registry import build, dictionary

WINDOWS = "1x=0:8,4x=8:256"


def test_scales_are_sorted_from_the_finest_on() -> None:
    assert layer_scales("16x=3,1x=5,4x=4") == (Scale(1, 5), Scale(4, 4), Scale(16, 3))
    assert window_scales("4x=8:256, 1x=0:8") == ((Scale(1, near=0, far=8), Scale(4, near=8, far=256)),)
    assert [scale.near for scale in window_scales("1x=0:128,4x=64:256", overlap=True)[0]] == [0, 64]
    groups = Scale(1, far=8, heads=2), Scale(1, far=None, heads=4), Scale(16, near=256, heads=2)
    assert window_scales("16x=256:*2,1x=0:8*2,1x=0:*4", overlap=True) == (groups,)
    assert window_scales("1x=0:128|1x=0:128|1x=0:") == ((Scale(1, far=128),), (Scale(1, far=128),), (Scale(1),))


def test_scales_share_the_heads_or_name_their_own() -> None:
    scales = layer_scales("16x=8,4x=9,1x=9")[1:]
    assert with_heads(scales, None) == scales
    assert with_heads(scales, "16x=2,4x=10") == (Scale(4, 9, heads=10), Scale(16, 8, heads=2))


# Architecture, flag, what else is given, and values of the flag.
REFUSED: list[tuple[str, str, dict, list]] = [
    ("multiscale_topdown", "scale_layers", {}, ["4x=8,6x=2,1x=1", "4x=8", "4x=1,4x=2,1x=1", "4x=0,1x=1", "0x=1,1x=1"]),
    ("multiscale_topdown", "scale_layers", {}, ["7,7,8,8", "4x=1,"]),
    ("coarse_lm", "scale_layers", {}, ["4x=6,1x=6", "0x=3"]),
    ("transformer_ql", "scale_layers", {}, ["2x=3", "1x=1,2x=1,3x=1"]),
    ("multiscale_bottomup", "scale_layers", {}, ["1x=3"]),
    ("multiscale_bottomup", "scale_heads", {}, ["4x=12,16x=12", "4x=6,1x=6", "4x=0,16x=12"]),
    ("retina_lm", "scale_heads", {"scale_windows": WINDOWS}, ["1x=3,2x=2", "1x=8,4x=8", "1x=12"]),
    ("retina_lm", "scale_windows", {}, ["1x=0:8,4x=9:256", "1x=0:8,4x=7:256", "1x=0:8,4x=2:6", "4x=0:8", "1x=0"]),
    ("retina_lm", "scale_windows", {}, ["1x=0:8,2x=8:9", "1x=0:8,16x=8:32", "1x=0:2,4x=2:24", "1x=4:4", "1x=0:8|"]),
    ("retina_lm", "scale_windows", {}, ["1x=0:8,1x=10:16", "1x=0:8*0", "1x=0:8*", "1x=0:8,1x=0:16,4x=8:32"]),
    ("retina_lm", "scale_windows", {"window_overlap": "allow"}, ["1x=0:8,4x=2:256", "1x=2:8"]),
    ("retina_lm", "scale_heads", {"scale_windows": "1x=0:8*4,4x=8:*8"}, ["1x=4,4x=8", "1x=12"]),
    ("retina_lm", "scale_heads", {"scale_windows": "1x=0:8*5,4x=8:*8"}, [None]),
    ("retina_lm", "scale_heads", {"scale_windows": "1x=0:8*5,4x=8:"}, [None]),
    ("retina_lm", "decoder_layers", {"scale_windows": "1x=0:8|1x=0:16|1x=0:"}, [2]),
    ("vanilla_lm", "scale_windows", {}, [WINDOWS, "2x=2:8", "0:8", f"1x=0:|{WINDOWS}"]),
]


@pytest.mark.parametrize(("arch", "flag", "others", "values"), REFUSED)
def test_scales_that_break_a_rule_get_one_sentence_with_their_flag(arch, flag, others, values) -> None:
    for value in values:
        with pytest.raises(UsageError, match=r"^--\S+( of \w+_lm)? must [^\n]*: got [^:]") as refused:
            build(arch, {"decoder_attention_heads": 12, flag: value, **others}, dictionary(5))
        assert str(refused.value).split()[0] == f"--{flag.replace('_', '-')}", value


@pytest.mark.parametrize("heads", [heads for heads in range(3, 20) if heads % 3])
def test_the_split_that_the_sentence_shows_is_valid(heads: int) -> None:
    flags = {"scale_windows": "1x=0:8,4x=8:256,16x=256:512", "decoder_attention_heads": heads}
    flags["decoder_embed_dim"] = 2 * heads
    with pytest.raises(UsageError, match=r"^--decoder-attention-heads must be a multiple of 3") as error:
        build("retina_lm", flags, dictionary(5))
    (shown,) = re.findall(r"as in (1x=\S+):", str(error.value))
    build("retina_lm", {**flags, "scale_heads": shown}, dictionary(5))
