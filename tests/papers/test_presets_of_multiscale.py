"""Every preset of the multi-scale paper: its size, counted by hand."""

import re

import pytest
from hydra.core.config_store import ConfigStore

from fairseq_ms.presets.registry import PRESETS
from tests.helpers.hydra import by_arch, parameters

PAPER = '"Multi-scale Transformer Language Models"'
ARCHS = sorted(arch for arch, preset in PRESETS.items() if preset.recipe.source.endswith(PAPER))
# Table 1.
VOCABULARIES = {"wt103": 33_346, "books": 31_300, "ccnews": 63_724}
POSITIONS = 512


def layers(count: int, dim: int) -> int:
    """Transformer layers of width 4 * dim, and the layer norm after the last."""
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
        # A layer norm after what is pooled.
        return total + layers(12, dim) + 2 * dim
    total += sum(layers(count, dim) for count in numbers)
    if model == "multiscale_bottomup":
        # The aggregation layer: as any layer, without a norm after it. A norm after what each coarse scale pools.
        return total + layers(1, dim) - 2 * dim + (len(numbers) - 1) * 2 * dim
    # Between two scales: a transposed convolution of kernel 4 and the projection of two widths to one.
    joints = len(numbers) - 1
    # A layer norm after what each scale pools.
    total += len(numbers) * 2 * dim
    total += joints * ((4 * dim * dim + dim) + (2 * dim * dim + dim))
    if "conv" in rest:
        total += sum(4**joint * dim * dim + dim for joint in range(1, joints + 1))
    return total


@pytest.mark.parametrize("arch", ARCHS)
def test_a_preset_has_as_many_parameters_as_counted_by_hand(arch: str) -> None:
    cfg = by_arch(arch)
    cfg.tokens_per_sample = POSITIONS
    (dataset,) = (name for name in VOCABULARIES if f"_{name}_" in arch)
    assert parameters(PRESETS[arch].model, cfg, VOCABULARIES[dataset]) == hand_count(arch)


def test_the_hand_count_is_the_paper_s() -> None:
    # Table 8, in half precision: 0.266 GB for 12 layers.
    assert hand_count("vanilla_lm_books_12") * 2 == pytest.approx(0.266e9, rel=0.005)


def test_hydra_has_a_schema_for_every_model_and_none_for_a_preset() -> None:
    stored = ConfigStore.instance().repo["model"]
    assert {f"{preset.model}.yaml" for preset in PRESETS.values()} <= stored.keys()
    assert not {f"{arch}.yaml" for arch in PRESETS} & stored.keys()
