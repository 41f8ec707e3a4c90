"""Every preset of the multi-scale paper: its size, counted by hand."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.models import MODEL_REGISTRY
from hydra.core.config_store import ConfigStore

from fairseq_ms.lm.registry import PRESETS
from tests.helpers.hydra import by_arch

PAPER = '"Multi-scale Transformer Language Models"'
ARCHS = sorted(arch for arch, preset in PRESETS.items() if preset.recipe.source.endswith(PAPER))
# Table 1.
VOCABULARIES = {"wt103": 33_346, "books": 31_300, "ccnews": 63_724}
POSITIONS = 512


def layers(count: int, dim: int) -> int:
    """Transformer layers of width 4 * dim, and the layer norm behind the last."""
    ffn = 4 * dim
    attention = 4 * (dim * dim + dim)
    feed_forward = dim * ffn + ffn + ffn * dim + dim
    norms = 2 * 2 * dim
    return count * (attention + feed_forward + norms) + 2 * dim


def hand_count(arch: str) -> int:
    """The parameters that a preset's name calls for; scales are those of the paper, a factor of 4 apart."""
    ((model, dataset, rest),) = re.findall(r"^(\w+?)_(wt103|books|ccnews)_(\w+)$", arch)
    numbers = [int(digits) for digits in re.findall(r"\d+", rest)]
    dim = {"books_30_narrow": 256, "books_20_narrow": 512}.get(f"{dataset}_{rest}", 768)
    dim = 1024 if dataset == "ccnews" else dim
    total = 2 * VOCABULARIES[dataset] * dim + POSITIONS * dim
    if model in ("vanilla_lm", "retina_lm"):
        return total + layers(numbers[0], dim)
    if model == "coarse_lm":
        # A layer norm behind what is pooled.
        return total + layers(12, dim) + 2 * dim
    total += sum(layers(count, dim) for count in numbers)
    if model == "multiscale_bottomup":
        # The aggregation layer: as any layer, without a norm behind it. A norm behind what each coarse scale pools.
        return total + layers(1, dim) - 2 * dim + (len(numbers) - 1) * 2 * dim
    # Between two scales: a transposed convolution of kernel 4 and the projection of two widths to one.
    joints = len(numbers) - 1
    # A layer norm behind what each scale pools.
    total += len(numbers) * 2 * dim
    total += joints * ((4 * dim * dim + dim) + (2 * dim * dim + dim))
    if "conv" in rest:
        total += sum(4**joint * dim * dim + dim for joint in range(1, joints + 1))
    return total


def words_of(arch: str) -> list[str]:
    """As many symbols as the paper's dictionary."""
    (dataset,) = (name for name in VOCABULARIES if f"_{name}_" in arch)
    return ["w"] * VOCABULARIES[dataset]


class _Words(list):
    def pad(self) -> int:
        return 1


def build(cfg: Any, arch: str) -> torch.nn.Module:
    """The model on no device at all: its parameters have shapes but no memory."""
    words = _Words(words_of(arch))
    task = SimpleNamespace(
        source_dictionary=words, target_dictionary=words, args=SimpleNamespace(tokens_per_sample=512)
    )
    cfg.tokens_per_sample, cfg.max_target_positions, cfg.add_bos_token = POSITIONS, None, False
    with torch.device("meta"):
        return MODEL_REGISTRY[PRESETS[arch].model].build_model(cfg, task)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_preset_has_as_many_parameters_as_counted_by_hand(arch: str) -> None:
    model = build(by_arch(arch), arch)
    assert sum(parameter.numel() for parameter in model.parameters()) == hand_count(arch)


def test_the_hand_count_is_the_paper_s() -> None:
    # Table 8, in half precision: 0.266 GB for 12 layers.
    assert hand_count("vanilla_lm_books_12") * 2 == pytest.approx(0.266e9, rel=0.005)


@pytest.mark.parametrize(
    ("model", "row", "layers_by_scale"),
    [
        ("multiscale_topdown", "ccnews_5_5_6_6", "64x=5,16x=5,4x=6,1x=6"),
        ("multiscale_topdown", "ccnews_5_5_9_9", "64x=5,16x=5,4x=9,1x=9"),
        ("multiscale_topdown", "ccnews_2_4_8_12", "64x=2,16x=4,4x=8,1x=12"),
        ("multiscale_topdown", "wt103_6_12", "4x=6,1x=12"),
        ("multiscale_topdown", "wt103_5_10", "4x=5,1x=10"),
        ("multiscale_bottomup", "wt103_5_10", "4x=5,1x=10"),
        ("multiscale_topdown", "books_8_12", "4x=8,1x=12"),
        ("multiscale_topdown", "books_4_8_12", "16x=4,4x=8,1x=12"),
        ("multiscale_topdown", "books_2_4_8_12", "64x=2,16x=4,4x=8,1x=12"),
        ("multiscale_topdown", "books_16_12_6_1", "64x=16,16x=12,4x=6,1x=1"),
        ("multiscale_topdown", "books_10_10_8_5", "64x=10,16x=10,4x=8,1x=5"),
        ("multiscale_topdown", "books_8_8_7_7", "64x=8,16x=8,4x=7,1x=7"),
        ("multiscale_topdown", "books_7_7_8_8", "64x=7,16x=7,4x=8,1x=8"),
        ("multiscale_topdown", "books_5_5_9_9", "64x=5,16x=5,4x=9,1x=9"),
        ("multiscale_topdown", "books_3_3_10_10", "64x=3,16x=3,4x=10,1x=10"),
        ("multiscale_topdown", "books_2_2_11_11", "64x=2,16x=2,4x=11,1x=11"),
        ("multiscale_topdown", "books_1_1_12_12", "64x=1,16x=1,4x=12,1x=12"),
        ("multiscale_topdown", "books_conv_7_7_8_8", "64x=7,16x=7,4x=8,1x=8"),
        ("multiscale_topdown", "books_max_7_7_8_8", "64x=7,16x=7,4x=8,1x=8"),
        ("multiscale_bottomup", "books_8_9_9", "16x=8,4x=9,1x=9"),
        ("multiscale_bottomup", "books_7_8_8", "16x=7,4x=8,1x=8"),
    ],
)
def test_every_multi_scale_row_of_tables_2_to_5_and_8_is_a_preset(model: str, row: str, layers_by_scale: str) -> None:
    cfg = by_arch(f"{model}_{row}")
    assert cfg.scale_layers == layers_by_scale
    assert cfg.downsampler == ("conv" if "conv" in row else "max" if "max" in row else "avg")
    assert cfg.decoder_embed_dim == (1024 if "ccnews" in row else 768)


def test_the_sizes_that_text_and_figure_3_name_are_presets() -> None:
    named = {"wt103": (12, 14, 16), "books": (2, 4, 6, 8, 10, 12, 14, 16)}
    assert all(by_arch(f"vanilla_lm_{data}_{n}").decoder_layers == n for data, sizes in named.items() for n in sizes)


def test_hydra_has_a_schema_for_every_model_and_none_for_a_preset() -> None:
    stored = ConfigStore.instance().repo["model"]
    assert {f"{preset.model}.yaml" for preset in PRESETS.values()} <= stored.keys()
    assert not {f"{arch}.yaml" for arch in PRESETS} & stored.keys()
