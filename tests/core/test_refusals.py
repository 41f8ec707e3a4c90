"""What the core refuses, in one sentence, instead of computing something else; and what it leaves as it was."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fairseq_ms.core.adaptive import Bands
from fairseq_ms.core.scales import Scale
from tests.core.test_model import ADAPTIVE, NAMES, build

TOKENS = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(1))
TEXT = torch.zeros(2, 9, dtype=torch.long)
# What reads a text.
CALLS: list[Callable[[Any, torch.Tensor], Any]] = [
    lambda m, text: m(text),
    lambda m, text: m(text, m.new_state(len(text))),
    lambda m, text: m.loss(text, text.clamp(0, 10)),
    lambda m, text: m.generate(text, 3),
]
CALLS_WITH_A_STATE: list[Callable[[Any, Any], Any]] = [
    lambda m, state: m(TEXT, state),
    lambda m, state: m.loss(TEXT, TEXT, state=state),
    lambda m, state: m.generate(TEXT, 3, state=state),
]
BLOCKS = ("TopDown", "BottomUp", "CoarseLM")
UNTIED, UNLIKE = {"tie_embeddings": False}, {"adaptive_input": Bands((5,))}
TIES = ("tie_adaptive_weights", "tie_adaptive_projections")
TIED = [dict.fromkeys(TIES[:count], True) for count in (1, 2)]
WITH_A_MEMORY = ("TransformerXL", "CompressiveTransformer", "TransformerQL")
OF_A_MEMORY = {"positions": "rotary", "qk_norm": True, "short_conv": 3, "sinks": True, "scale_embedding": True}
OF_A_MEMORY |= {"kv_heads": 12}
# A name, sizes, and how the sentence begins that refuses them.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(("Vanilla", {name: value}, name) for name, value in {"heads": 0, "dim": 0, "ffn_dim": -4, "layers": -1}.items()),
    *(("Vanilla", {name: -1}, name) for name in ("max_positions", "short_conv")),
    ("Vanilla", {"heads": 5}, "heads must divide dim 24"),
    ("Vanilla", {"activation": "silu"}, "activation"),
    ("Vanilla", {"positions": "sinusoidal"}, "positions"),
    ("Vanilla", {"qk_norm": "learned"}, "qk_norm"),
    ("Vanilla", {"norm": "batch"}, "norm"),
    ("Vanilla", {"init_residual": "one"}, "init_residual"),
    ("Vanilla", {"rotary_base": 1.0}, "rotary_base"),
    ("Vanilla", {"norm_eps": 0.0}, "norm_eps must be above 0"),
    ("Vanilla", {"final_norm": False, "normalize_before": False}, "final_norm must be True in post-LN"),
    ("Vanilla", {"unpredicted": (11,)}, "unpredicted must be symbols, 0 to 10: got 11"),
    ("Vanilla", {"unpredicted": (1,), "adaptive_softmax": Bands((4,))}, "unpredicted must be empty"),
    ("Vanilla", {"padding_idx": 11}, "padding_idx must be a symbol, 0 to 10: got 11"),
    ("Vanilla", {"dropout": 1.5}, "dropout"),
    ("HAED", {"attention_dropout": -0.1}, "attention_dropout"),
    ("Vanilla", {**UNTIED, "output_vocab_size": 12}, "output_vocab_size must be at most"),
    ("Vanilla", {"output_vocab_size": 5}, "output_vocab_size must be vocab_size 11 with tie_embeddings"),
    ("Vanilla", {"adaptive_input": Bands((4, 7))}, "tie_embeddings"),
    ("Vanilla", {**UNTIED, "tie_adaptive_weights": True}, "tie_adaptive_weights"),
    *(("Vanilla", {**of, "adaptive_softmax": Bands((4,)), tie: True}, tie) for tie in TIES for of in (UNTIED, UNLIKE)),
    *(
        ("Vanilla", {**UNTIED, which: Bands(*bands)}, f"{which}.factor")
        for which in ("adaptive_input", "adaptive_softmax")
        for bands in (((2, 4, 7),), ((4,), 0.0))
    ),
    *(
        ("Vanilla", {"adaptive_softmax": Bands(cutoffs)}, "adaptive_softmax.cutoffs .* from at least 1 to at most")
        for cutoffs in ((), (0, 5), (7, 4), (4, 4), (4, 12))
    ),
    ("Vanilla", {**UNTIED, "adaptive_input": Bands((4, 7)), "padding_idx": 4}, "adaptive_input.cutoffs .* least 5 "),
    *((name, {"positions": "rotary", "dim": 36}, "rotary positions") for name in (*BLOCKS, "Vanilla", "Retina")),
    ("TopDown", {"scales": (Scale(1, 1), Scale(3, 1), Scale(4, 1))}, "scales"),
    ("BottomUp", {"scales": (Scale(1, 1),)}, "scales"),
    ("BottomUp", {"scales": (Scale(1, 1), Scale(4, 1, heads=7))}, "Scale.heads"),
    ("BottomUp", {"heads": 3}, "heads .*4x=2,16x=1: got 3"),
    ("BottomUp", {"heads": 10, "head_dim": 4}, "heads must divide dim 24"),
    *((name, {"scales": (Scale(1, 1), Scale(4))}, "Scale.layers") for name in ("TopDown", "BottomUp", "TransformerQL")),
    *((name, {"scales": (Scale(1, -2), Scale(4, 1))}, "Scale.layers") for name in ("TopDown", "TransformerQL")),
    ("CoarseLM", {"scale": Scale(4)}, "Scale.layers"),
    ("TopDown", {"scales": (Scale(1, 1, far=4), Scale(4, 1))}, "Scale.near"),
    ("Retina", {"scales": (Scale(1, layers=9, far=4),)}, "Scale.layers"),
    ("BottomUp", {"aggregation_gate": True, "init_residual": "zero"}, "init_residual"),
    ("Retina", {"heads": 4}, "heads .*1x=2,4x=1,16x=1: got 4"),
    ("Retina", {"heads": 2}, "heads must be at least 3"),
    *((name, {"kv_heads": 5}, "heads must be a multiple of kv_heads 5: got 12") for name in ("Vanilla", *BLOCKS)),
    ("Retina", {"kv_heads": 4, "heads": 12}, "Scale.heads must be a multiple of 3.* kv_heads 4: got 4 for 1x=0:8"),
    *((name, {"kv_heads": 2}, "kv_heads must be left out") for name in ("HAED", "HRED")),
    ("Retina", {"scales": (Scale(1, far=8, heads=4), Scale(4, near=8, far=16, heads=4))}, "Scale.heads"),
    ("Retina", {"scales": (Scale(1, far=0),)}, "scales must be near:far"),
    ("Retina", {"scales": (Scale(1, far=8), Scale(4, near=3, far=26))}, "scales .*nearest: 4x=4:28"),
    ("Retina, turns", {"layers": 1}, "layers"),
    ("Retina", {"downsampler": "mean", "scales": (Scale(1),)}, "downsampler"),
    *((name, {"downsampler": "sum"}, "downsampler") for name in ("Retina", "TopDown", "BottomUp")),
    *((name, {"segment_len": 0}, "segment_len") for name in WITH_A_MEMORY),
    *((name, {"mem_len": -1}, "mem_len") for name in WITH_A_MEMORY),
    *((name, {part: value}, f"{part} must be left") for name in WITH_A_MEMORY for part, value in OF_A_MEMORY.items()),
    *(("CompressiveTransformer", {"compression_rate": rate}, "compression_rate") for rate in (3, 1)),
    ("TransformerQL", {"segment_len": 6, "scales": (Scale(1, 1), Scale(4, 1))}, "segment_len"),
    ("TransformerQL", {"compression": "mean"}, "compression"),
    ("TransformerQL", {"droppath": 1.5}, "droppath"),
    ("HAED", {"main": "mlp"}, "main"),
    ("HAED", {"dim": 4, "position_dim": 4}, "dim"),
    ("HAED", {"decoder": "transformer", "decoder_units": 7}, "local_heads"),
    *(("HAED", {"separators": separators}, "separators") for separators in ((), (3, 12))),
    ("HAED", {"padding_idx": 3}, "separators"),
    ("HAED", {"segmentation": "fixed"}, "separators"),
    ("HAED", {"segmentation": "chars"}, "segmentation"),
    ("HAED", {"max_segment_len": 0}, "max_segment_len"),
]


@pytest.mark.parametrize(("name", "changes", "sentence"), REFUSED)
def test_sizes_that_do_not_fit_together_are_refused(name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        build(name, **changes)


@pytest.mark.parametrize("name", ["Vanilla", "HAED", "TransformerXL"])
def test_what_is_no_text_is_refused(name: str) -> None:
    model = build(name)
    for text in (TEXT[:0], TEXT[:, :0], TEXT[None], TEXT.float(), TEXT.bool()):
        for call in CALLS:
            with pytest.raises(ValueError, match=r"^(tokens|prompt) must be "):
                call(model, text)
    for targets in (TEXT.float(), TEXT.bool(), TEXT[:, :8]):
        with pytest.raises(ValueError, match=r"^targets must "):
            model.loss(TEXT, targets)
    for prompt in ([], [TEXT]):
        with pytest.raises(ValueError, match=r"^prompt must "):
            model.generate(prompt, 3)
    with pytest.raises(ValueError, match=r"^state must be left out "):
        model.generate([TEXT[0]], 3, state=model.new_state(1))


@pytest.mark.parametrize(("name", "heads"), [("Retina", (2, 2, 2)), ("BottomUp", (0, 3, 3))])
def test_scales_share_the_heads_evenly_where_none_names_its_own(name: str, heads: tuple[int, ...]) -> None:
    shared = build(name, heads=6, vocab_size=50)
    assert {scale.heads for scale in shared.config.scales} == {0}
    scales = tuple(replace(scale, heads=own) for scale, own in zip(shared.config.scales, heads, strict=True))
    named = build(name, heads=6, vocab_size=50, scales=scales)
    named.load_state_dict(shared.state_dict())
    assert torch.equal(named(TOKENS)[0], shared(TOKENS)[0])


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
    for call in (*CALLS, lambda model, text: model(text[:, 2:3], model(text[:, :2])[1])):
        with pytest.raises(ValueError if name in ("HAED", "HRED") else (IndexError, ValueError)):
            call(model, text)


@pytest.mark.parametrize("name", [name for name in NAMES if "," not in name])
def test_what_is_no_state_is_refused(name: str) -> None:
    model = build(name)
    with pytest.raises(ValueError, match=r"^batch_size must be at least 0: got -1"):
        model.new_state(-1)
    for state in (0, model, model.new_state(2).__dict__):
        for call in CALLS_WITH_A_STATE:
            with pytest.raises(ValueError, match=r"^state must be what new_state or a call before has returned: got "):
                call(model, state)


@pytest.mark.parametrize("name", NAMES)
def test_lists_are_as_good_as_tuples(name: str) -> None:
    config = build(name).config
    values = {field: list(value) if isinstance(value, tuple) else value for field, value in vars(config).items()}
    assert hash(type(config)(**values)) == hash(config)
    assert Bands([3, 7]) == Bands((3, 7))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 60},  # more than there are positions
        *({name: value} for name, value in (("n", 0), ("n", 2.5), ("temperature", -1.0), ("temperature", math.nan))),
        *({name: value} for name, value in (("top_k", -2), ("top_k", 1.5), ("top_p", 0.0), ("eos_idx", 11))),
        *({"allowed": torch.ones(symbols, dtype=torch.bool)} for symbols in (1, 10, 12)),
        {"allowed": torch.zeros(11, dtype=torch.bool)},
        {"allowed": torch.ones(11)},
    ],
)
def test_a_refused_sampling_leaves_the_state_where_it_was(sampling: dict[str, Any]) -> None:
    model = build("Vanilla")
    _, state = model(TEXT)
    with pytest.raises(ValueError, match=f"^({next(iter(sampling))}|a text) must "):
        model.generate(TEXT, **{"n": 2, **sampling}, state=state)
    assert state.length == 9


@pytest.mark.parametrize("name", ["Vanilla", "HAED", "TransformerXL"])
def test_tokens_and_targets_may_be_integers_of_any_width(name: str) -> None:
    model, tokens = build(name), torch.randint(11, (2, 9))
    for narrow in (tokens.to(torch.uint8), tokens.int()):
        for state in (lambda: None, lambda: model.new_state(2)):
            assert model(narrow, state())[0].equal(model(tokens, state())[0])
        assert model.loss(narrow, narrow).equal(model.loss(tokens, tokens))
        assert model.generate(narrow, 2, temperature=0).equal(model.generate(tokens, 2, temperature=0))


@pytest.mark.parametrize("name", ["Vanilla", "TransformerXL"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_target_below_zero_is_refused_unless_it_is_ignored(name: str, grad: bool) -> None:
    model = build(name, vocab_size=50)
    targets = torch.full_like(TOKENS, -1)
    with torch.set_grad_enabled(grad), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        model.loss(TOKENS, targets)
    assert model.loss(TOKENS, targets, ignore_index=-1) == 0


@torch.no_grad()
def test_a_state_does_not_change_with_the_tensor_that_it_has_read() -> None:
    model = build("Vanilla", vocab_size=50).double()
    expected = model(TOKENS[:, :8])[0][:, 4:]
    buffer = TOKENS[:, :4].clone()
    _, state = model(buffer)
    buffer.copy_(TOKENS[:, 4:8])
    # float64: sums over more keys at once or fewer.
    torch.testing.assert_close(model(buffer, state)[0], expected, rtol=0, atol=1e-9)


@torch.no_grad()
def test_reading_a_stream_copies_no_tokens_but_those_of_the_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("TransformerQL", vocab_size=50, segment_len=8, mem_len=8).double()
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
    torch.testing.assert_close(model(TOKENS[:, 19:20], state)[0], expected[:, 19:], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in NAMES),
        ("HAED", {"init_std": 0.1}),
        ("HAED", {"decoder": "transformer", "encoder": "lstm"}),
        ("Vanilla", {"norm": "rms", "qk_norm": True}),
        ("BottomUp", {"aggregation_gate": True}),
        *((name, ADAPTIVE) for name in ("Vanilla", "TransformerXL")),
        *(("Vanilla", {**ADAPTIVE, **tied}) for tied in TIED),
    ],
)
def test_all_weights_are_drawn_anew(name: str, changes: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = build(name, **changes)
    model.to_empty(device=TOKENS.device)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    torch.manual_seed(1)
    model.reset_parameters()
    fresh = build(name, **changes)
    torch.manual_seed(1)
    fresh.reset_parameters()
    built = dict(build(name, **changes).named_parameters())
    for (name, parameter), expected in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert parameter.equal(expected), name
        # Of so many numbers, two samples of one distribution do not differ by more; the others a test sets.
        if parameter.numel() >= 200 and ".short_conv." not in name:
            torch.testing.assert_close(built[name].std(), parameter.std(), rtol=0.3, atol=0.0)
    # Nothing else was on the device without memory.
    assert model(TEXT)[0].equal(fresh(TEXT)[0])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in NAMES if "," not in name),
        *((name, {**ADAPTIVE, **tied}) for name in ("Vanilla", "TransformerXL") for tied in TIED),
    ],
)
def test_a_model_filled_from_another_ones_weights_shares_what_that_shares(
    name: str, changes: dict[str, Any], assign: bool
) -> None:
    model = build(name, **changes)
    with torch.device("meta"):
        filled = build(name, **changes)
    filled.to_empty(device="cpu").load_state_dict(model.state_dict(), assign=assign)
    assert [n for n, _ in filled.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert filled(TEXT)[0].equal(model(TEXT)[0])


def test_a_main_model_without_positions_reads_texts_of_any_length() -> None:
    model = build("HRED", vocab_size=50, max_positions=16, main_units=8, encoder_units=8)
    assert model.max_length() is None
    assert model(TOKENS)[0].shape == (2, 24, 50)
