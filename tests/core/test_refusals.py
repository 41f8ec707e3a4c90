"""What the core refuses, in one sentence, instead of computing something else; and what it leaves as it was."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fairseq_ms.core import (
    HAED,
    HRED,
    HAEDConfig,
    HREDConfig,
    TransformerQL,
    TransformerQLConfig,
    TransformerXL,
    TransformerXLConfig,
    Vanilla,
    VanillaConfig,
)
from fairseq_ms.core.adaptive import Bands
from fairseq_ms.core.cache import CannotTruncate
from tests.core.test_model import ADAPTIVE, NAMES, build

SIZES: dict[str, Any] = {"vocab_size": 50, "dim": 32, "ffn_dim": 64, "heads": 4}
VANILLA = VanillaConfig(**SIZES, layers=1)
XL = TransformerXLConfig(**SIZES, layers=2)
TOKENS = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"heads": 0}, "heads must be at least 1: got 0"),
        ({"dim": 0}, "dim must be at least 1: got 0"),
        ({"ffn_dim": -4}, "ffn_dim must be at least 1: got -4"),
        ({"max_positions": -1}, "max_positions must be at least 0: got -1"),
        ({"output_vocab_size": 60, "tie_embeddings": False}, "output_vocab_size must be at most vocab_size 50: got 60"),
        ({"layers": -1}, "layers must be at least 1: got -1"),
        ({"output_vocab_size": 20}, "output_vocab_size must be vocab_size 50 with tie_embeddings: got 20"),
        ({"adaptive_input": Bands((10, 30))}, "tie_embeddings must be False with an adaptive_input"),
        ({"tie_embeddings": False, "tie_adaptive_weights": True}, "tie_adaptive_weights needs adaptive_input and"),
        (
            {"tie_embeddings": False, "adaptive_softmax": Bands((10,)), "tie_adaptive_projections": True},
            "tie_adaptive_projections needs adaptive_input and adaptive_softmax",
        ),
        ({"adaptive_softmax": Bands((10, 20, 30))}, "factor 4.0 leaves the last of 4 bands no width of dim 32"),
        (
            {"tie_embeddings": False, "adaptive_input": Bands((10, 20, 30))},
            "factor 4.0 leaves the last of 4 bands no width of dim 32",
        ),
        ({"adaptive_softmax": Bands((10, 60))}, "to at most vocab_size 50: got 10,60"),
        (
            {"adaptive_input": Bands((4, 9)), "padding_idx": 4, "tie_embeddings": False},
            "adaptive_input.cutoffs must ascend from at least 5 to at most vocab_size 50: got 4,9",
        ),
        (
            {"adaptive_input": Bands((9,)), "adaptive_softmax": Bands((10,)), "tie_adaptive_weights": True},
            "tie_adaptive_weights needs adaptive_input and adaptive_softmax of the same cutoffs and factor",
        ),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        Vanilla(replace(VANILLA, **changes))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(("name", "heads"), [("Retina", (2, 2, 2)), ("BottomUp", (0, 3, 3))])
def test_scales_share_the_heads_evenly_where_none_names_its_own(name: str, heads: tuple[int, ...]) -> None:
    shared = build(name, heads=6, vocab_size=50)
    assert {scale.heads for scale in shared.config.scales} == {0}
    scales = tuple(replace(scale, heads=own) for scale, own in zip(shared.config.scales, heads, strict=True))
    named = build(name, heads=6, vocab_size=50, scales=scales)
    named.load_state_dict(shared.state_dict())
    assert torch.equal(named(TOKENS)[0], shared(TOKENS)[0])


@pytest.mark.parametrize(
    ("name", "heads", "sentence"),
    [
        (
            "Retina",
            4,
            "heads must be a multiple of 3, one for each scale, unless they are split as in 1x=2,4x=1,16x=1: got 4",
        ),
        (
            "BottomUp",
            3,
            "heads must be a multiple of 2, one for each scale, unless they are split as in 4x=2,16x=1: got 3",
        ),
        ("Retina", 2, "heads must be at least 3, one for each scale that shares them: got 2"),
    ],
)
def test_heads_that_scales_cannot_share_are_refused(name: str, heads: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        build(name, heads=heads)


@pytest.mark.parametrize("cutoffs", [(), (0, 10), (30, 10), (10, 10)])
def test_cutoffs_ascend_from_one(cutoffs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cutoffs must ascend from at least 1 to at most vocab_size 50: got "):
        Vanilla(replace(VANILLA, adaptive_softmax=Bands(cutoffs)))
    with pytest.raises(ValueError, match=r"factor must be above 0: got 0\.0"):
        Vanilla(replace(VANILLA, adaptive_softmax=Bands((10,), 0.0)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in NAMES),
        ("Vanilla", ADAPTIVE),
        *((name, {"padding_idx": 13}) for name in ("HAED", "HRED")),
    ],
)
@pytest.mark.parametrize("token", [-1, 11, 12])
def test_tokens_that_the_model_does_not_know_are_refused(name: str, changes: dict[str, Any], token: int) -> None:
    model, text = build(name, **changes), torch.tensor([[3, 5, token, 4]])
    for call in (
        model,
        lambda text: model(text, model.new_state(1)),
        lambda text: model(text[:, 2:3], model(text[:, :2])[1]),
        lambda text: model.loss(text, text.clamp(0, 10)),
        lambda text: model.generate(text, 2),
    ):
        with pytest.raises((IndexError, ValueError)):
            call(text)


@pytest.mark.parametrize("model", [Vanilla(VANILLA), HAED(HAEDConfig(vocab_size=50, separators=(3,), layers=1))])
def test_tokens_and_targets_are_integers_of_any_width(model: Vanilla | HAED) -> None:
    model.eval()
    for given in (torch.tensor([[1.7, 2.2]]), torch.tensor([[True, False]])):
        with pytest.raises(ValueError, match=f"tokens must be integers: got {given.dtype}"):
            model(given)
        with pytest.raises(ValueError, match=f"tokens must be integers: got {given.dtype}"):
            model.generate(given, 3)
        with pytest.raises(ValueError, match=f"targets must be integers: got {given.dtype}"):
            model.loss(given.long(), given)
    narrow = TOKENS.to(torch.uint8)
    assert torch.equal(model(narrow)[0], model(TOKENS)[0])
    assert torch.equal(model.loss(narrow, narrow), model.loss(TOKENS, TOKENS))
    assert torch.equal(model.generate(narrow, 2, temperature=0), model.generate(TOKENS, 2, temperature=0))


def test_the_heads_of_a_retina_have_no_width_of_their_own() -> None:
    with pytest.raises(ValueError, match="head_dim must be left out, since the heads of a retina share dim: got 5"):
        build("Retina", head_dim=5)


def test_padding_ends_no_word() -> None:
    with pytest.raises(ValueError, match="separators must be symbols from 0 to 10, none of them padding: got"):
        build("HAED", padding_idx=3)


def test_a_state_says_where_it_can_be_cut_off() -> None:
    state = build("TransformerXL", vocab_size=50)(TOKENS[:, :9])[1]
    with pytest.raises(CannotTruncate, match=r"length must be .* got -1"):
        state.truncate(-1)


@pytest.mark.parametrize("name", NAMES)
def test_lists_are_as_good_as_tuples(name: str) -> None:
    config = build(name).config
    values = {field: list(value) if isinstance(value, tuple) else value for field, value in vars(config).items()}
    assert hash(type(config)(**values)) == hash(config)
    assert Bands([3, 7]) == Bands((3, 7))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        ({"temperature": float("nan")}, "temperature must be at least 0: got nan"),
        ({"top_k": 1.5}, "top_k must be a whole number of at least 0: got 1.5"),
        ({"n": 2.5}, "n must be a whole number of at least 1: got 2.5"),
    ],
)
def test_a_refused_sampling_leaves_the_state_where_it_was(sampling: dict[str, Any], sentence: str) -> None:
    model = build("Vanilla", vocab_size=50)
    _, state = model(TOKENS[:, :9])
    with pytest.raises(ValueError, match=sentence):
        model.generate(TOKENS[:, 9:12], **{"n": 2, **sampling}, state=state)
    assert state.length == 9


@pytest.mark.parametrize("model", [Vanilla(VANILLA), TransformerXL(XL)])
@pytest.mark.parametrize("grad", [True, False])
def test_a_target_below_zero_is_refused_unless_it_is_ignored(model: Vanilla | TransformerXL, grad: bool) -> None:
    targets = torch.full_like(TOKENS, -1)
    with torch.set_grad_enabled(grad), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        model.loss(TOKENS, targets)
    assert model.loss(TOKENS, targets, ignore_index=-1) == 0


@torch.no_grad()
def test_a_state_does_not_change_with_the_tensor_that_it_has_read() -> None:
    model = Vanilla(VANILLA).eval()
    expected = model(TOKENS[:, :8])[0][:, 4:]
    buffer = TOKENS[:, :4].clone()
    _, state = model(buffer)
    buffer.copy_(TOKENS[:, 4:8])
    # Sums over more keys at once or fewer.
    torch.testing.assert_close(model(buffer, state)[0], expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_reading_a_stream_copies_no_tokens_but_those_of_the_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TransformerQL(TransformerQLConfig(**SIZES, segment_len=8, mem_len=8)).eval()
    state = model.new_state(2)
    longest, cat = [0], torch.cat

    def watched(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        joined = cat(tensors, dim=dim)
        if joined.dtype == torch.long:
            longest[0] = max(longest[0], joined.size(1))
        return joined

    monkeypatch.setattr(torch, "cat", watched)
    for tokens in TOKENS.repeat(1, 4).split(6, dim=1):
        model(tokens, state)
    assert longest[0] <= 8 + 6
    # Going back still finds all of them.
    expected, state = model(TOKENS[:, :20])[0], model.new_state(2)
    for tokens in TOKENS[:, :21].split(5, dim=1):
        model(tokens, state)
    state.truncate(19)
    torch.testing.assert_close(model(TOKENS[:, 19:20], state)[0], expected[:, 19:], rtol=0, atol=1e-5)


def test_generating_leaves_the_mode_of_every_part() -> None:
    model = Vanilla(VANILLA).train()
    model.embed.eval()
    model.generate(TOKENS, 1)
    assert model.training
    assert not model.embed.training


@pytest.mark.parametrize("segmentation", ["words", "fixed"])
def test_a_hierarchical_model_made_without_memory_has_its_separators(segmentation: str) -> None:
    separators = (3, 7) if segmentation == "words" else ()
    config = HAEDConfig(vocab_size=50, separators=separators, segmentation=segmentation, layers=1)
    model = HAED(config).eval()
    with torch.device("meta"):
        empty = HAED(config).eval()
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    torch.testing.assert_close(empty(TOKENS)[0], model(TOKENS)[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in NAMES),
        ("HAED", {"init_std": 0.1}),
        ("HAED", {"decoder": "transformer", "encoder": "lstm"}),
        ("Vanilla", {"norm": "rms", "qk_norm": True}),
        ("BottomUp", {"aggregation_gate": True}),
        *((name, ADAPTIVE) for name in ("Vanilla", "TransformerXL")),
        ("Vanilla", {**ADAPTIVE, "tie_adaptive_weights": True, "tie_adaptive_projections": True}),
    ],
)
def test_all_weights_are_drawn_anew(name: str, changes: dict[str, Any]) -> None:
    model = build(name, **changes)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    torch.manual_seed(1)
    model.reset_parameters()
    fresh = build(name, **changes)
    torch.manual_seed(1)
    fresh.reset_parameters()
    for (name, parameter), expected in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert parameter.equal(expected), name


def test_a_main_model_without_positions_reads_texts_of_any_length() -> None:
    model = HRED(HREDConfig(vocab_size=50, separators=(3,), max_positions=16, main_units=8, encoder_units=8)).eval()
    assert model.max_length() is None
    assert model(TOKENS)[0].shape == (2, 24, 50)
