"""The streaming models against per-token loops, in outputs and gradients, and what their memory promises."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_ms.core import Memory
from tests.helpers.dropout import drop_nothing
from tests.helpers.gradients import assert_same_with_gradients
from tests.helpers.operations import Operations
from tests.helpers.seeds import seeds
from tests.references import streaming as references
from tests.references.parts import weights_of
from tests.registry import Case, build, dictionary, exact_case, random_case

ARCHS = ["transformer_xl", "compressive_transformer", "transformer_ql"]
SEEDS = seeds(8, 20)
# float64; sums of a few hundred terms of order 1, through at most seven layers.
EXACT = 1e-9


def loops(arch: str, flags: dict[str, Any], model: Any, tokens: Tensor) -> Tensor:
    """Logits (B, T, V) by the per-token loops."""
    rows = [getattr(references, arch)(weights_of(model), flags, row.tolist()) for row in tokens]
    if arch == "compressive_transformer":
        rows = [logits for logits, _ in rows]
    return torch.stack([torch.stack(logits) for logits in rows])


def random_length(case: Case) -> int:
    """Several segments and a piece of one more."""
    length = case.model.decoder.core.segment_len
    return case.rng.randint(1, 4) * length + case.rng.randrange(length)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("arch", ARCHS)
def test_logits_and_gradients_of_several_segments_are_those_of_the_papers(arch: str, seed: int) -> None:
    """Two calls cut anywhere, the second with the memory of the first; the second row ends in padding."""
    case = exact_case(arch, seed)
    # Enough segments for a short memory to fill and for states to leave it again.
    length = max(3 * case.flags["tokens_per_sample"], 16) + case.rng.randint(1, 5)
    tokens, cut = case.tokens(2, length), case.rng.randint(1, length - 2)
    expected = loops(arch, case.flags, case.model, tokens)[:, :-1]
    tokens[1, -1] = case.dictionary.pad()
    whole = case.model(tokens)[0]
    first, extra = case.model(tokens[:, :cut])
    second, _ = case.model(tokens[:, cut:], memory=extra["memory"])
    # The reconstruction loss alone trains the compression.
    compression = [*getattr(case.model.decoder.core, "compress", torch.nn.Module()).parameters()]
    parameters = [p for p in case.model.parameters() if not any(p is other for other in compression)]
    if compression:
        grads = torch.autograd.grad(whole.sum(), compression, allow_unused=True, retain_graph=True)
        assert all(grad is None for grad in grads)
    assert_same_with_gradients(whole[:, :-1], expected, parameters, EXACT)
    torch.testing.assert_close(torch.cat([first, second], dim=1)[:, :-1], expected, rtol=EXACT, atol=EXACT)


def test_droppath_keeps_the_scales_of_the_paper() -> None:
    """Section 2.3: with probability p / (l - 1) each, only scales j .. l are kept, for j = 2 .. l; else all."""
    case = random_case("transformer_ql", 0)
    flags = {**case.flags, "scale_layers": "1x=1,2x=1,4x=1", "tokens_per_sample": 4, "mem_len": 3, "droppath": 0.6}
    flags |= {"compression": "avg", "decoder_normalize_before": True}
    model = build("transformer_ql", {"init_std": 0.4, **flags}, case.dictionary).double().train()
    drop_nothing(model)
    tokens, seen, draws = case.tokens(1, 4), [], 400
    with torch.no_grad():
        kept = [
            torch.stack(references.transformer_ql(weights_of(model), flags, tokens[0].tolist(), finest))
            for finest in (1, 2, 3)
        ]
        for _ in range(draws):
            logits = model(tokens)[0][0]
            seen += [j for j, expected in enumerate(kept, 1) if (logits - expected).abs().max() < EXACT]
    assert len(seen) == draws
    # Shares 0.4, 0.3 and 0.3, each with a standard deviation of 0.025 at most: four of them.
    for finest, share in ((1, 0.4), (2, 0.3), (3, 0.3)):
        assert abs(seen.count(finest) / draws - share) < 0.1


@pytest.mark.parametrize("scale_layers", ["1x=1,2x=2,4x=1", "1x=1,2x=1,4x=1,8x=1", "1x=1,3x=1,6x=1"])
def test_scales_without_a_memory_equal_the_per_token_loops_at_once_and_token_by_token(scale_layers: str) -> None:
    case = random_case("transformer_ql", 0)
    flags = {**case.flags, "scale_layers": scale_layers, "tokens_per_sample": 24, "mem_len": 0}
    model = build("transformer_ql", {"init_std": 0.4, **flags}, case.dictionary).double().eval()
    tokens = case.tokens(2, 29)
    state: dict = {}
    with torch.no_grad():
        expected = loops("transformer_ql", flags, model, tokens)
        torch.testing.assert_close(model(tokens)[0], expected, rtol=EXACT, atol=EXACT)
        for end in range(1, tokens.size(1) + 1):
            cached = model.decoder(tokens[:, :end], incremental_state=state)[0]
            torch.testing.assert_close(cached[:, 0], expected[:, end - 1], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_memory_survives_a_safe_checkpoint_and_reordering(arch: str, tmp_path) -> None:
    case = exact_case(arch, 1)
    first, second = case.tokens(3, random_length(case)), case.tokens(3, random_length(case))
    memory = case.model(first)[1]["memory"]
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    saved = torch.load(tmp_path / "memory.pt", weights_only=True)
    loaded = Memory.from_state_dict(saved).to(next(case.model.parameters()))
    order = torch.tensor([2, 0, 2])
    logits = case.model(second[order], memory=loaded.reorder(order))[0]
    assert torch.equal(logits, case.model(second[order], memory=memory.reorder(order))[0])
    torch.testing.assert_close(logits, case.model(second, memory=memory)[0][order], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_forgotten_stream_is_at_its_beginning_and_the_others_are_not(arch: str) -> None:
    case = exact_case(arch, 3)
    length = case.model.decoder.core.segment_len
    first, second = case.tokens(2, 3 * length), case.tokens(2, 2 * length)
    memory = case.model(first)[1]["memory"].forget(torch.tensor([True, False]))
    logits = case.model(second, memory=memory)[0]
    torch.testing.assert_close(logits[0], case.model(second)[0][0], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(logits[1], case.model(torch.cat([first, second], 1))[0][1, 3 * length :])


def test_a_stream_that_has_overflowed_in_half_precision_begins_anew() -> None:
    state = torch.tensor([[[torch.nan]], [[torch.inf]], [[1.0]], [[2.0]]], dtype=torch.float16)
    other = torch.tensor([[[1.0]], [[2.0]], [[3.0]], [[-torch.inf]]], dtype=torch.float16)
    memory = Memory({"layer0": state, "layer1": other}, torch.zeros(4, 0, dtype=torch.long))
    finite = memory.finite().states
    assert finite["layer0"].flatten().tolist() == [0.0, 0.0, 1.0, 0.0]
    assert finite["layer1"].flatten().tolist() == [0.0, 0.0, 3.0, 0.0]
    forgotten = memory.forget(torch.tensor([True, True, False, False])).states["layer0"]
    assert forgotten.flatten().tolist() == [0.0, 0.0, 1.0, 2.0]
    # Other types do not overflow, and what is infinite there is for the user to see.
    full = Memory({"layer0": state.float()}, torch.zeros(4, 0, dtype=torch.long))
    assert full.finite() is full


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("arch", ARCHS)
def test_cached_decoding_continues_a_memory(arch: str, seed: int) -> None:
    case = exact_case(arch, seed)
    first, second = case.tokens(2, random_length(case)), case.tokens(2, random_length(case))
    memory = case.model(first)[1]["memory"]
    whole = case.model(torch.cat([first, second], dim=1))[0][:, first.size(1) :]
    state: dict = {}
    with torch.no_grad():
        for end in range(1, second.size(1) + 1):
            cached, extra = case.model.decoder(second[:, :end], incremental_state=state, memory=memory)
            torch.testing.assert_close(cached[:, 0], whole[:, end - 1], rtol=EXACT, atol=EXACT)
            # The state continues the stream, and the memory that it began with does not.
            assert extra["memory"] is None
        # Going back starts from the memory again, not from nothing.
        again = case.model.decoder(second[:, :1], incremental_state=state)[0]
    torch.testing.assert_close(again[:, 0], whole[:, 0], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("arch", ARCHS)
def test_sinusoids_are_computed_once_for_a_row_and_again_only_for_another_type(arch: str) -> None:
    words = dictionary(9)
    flags: dict[str, Any] = {"decoder_embed_dim": 8, "decoder_ffn_embed_dim": 8, "decoder_attention_heads": 2}
    model = build(arch, {**flags, "tokens_per_sample": 4, "mem_len": 12}, words).eval()
    tokens = torch.randint(4, len(words), (1, 64))
    with torch.inference_mode(), Operations() as ran:
        first = model(tokens)[0]
    assert ran.names.count("aten::sin") == 1
    with Operations() as ran:
        # What inference has left behind can be trained with.
        model(tokens)[0].sum().backward()
        assert torch.equal(copy.deepcopy(model)(tokens)[0], first)
    assert "aten::sin" not in ran.names
    with Operations() as ran:
        twice = model.double()(tokens)[0]
    assert ran.names.count("aten::sin") == 1
    fresh = build(arch, {**flags, "tokens_per_sample": 4, "mem_len": 12}, words).double().eval()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(twice, fresh(tokens)[0], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_foreign_memory_is_refused_in_one_sentence(arch: str) -> None:
    case = exact_case(arch, 0)
    memory = case.model(case.tokens(2, 7))[1]["memory"]
    with pytest.raises(ValueError, match="memory: must hold"):
        case.model(case.tokens(3, 7), memory=memory)
    with pytest.raises(ValueError, match="memory: must be None or"):
        case.model(case.tokens(2, 7), memory=[torch.zeros(1)])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("recompute", ["pointwise", "none"])
def test_checkpointed_activations_change_no_gradient(arch: str, recompute: str) -> None:
    case = random_case(arch, 2)
    words = dictionary(9)
    tokens = case.tokens(2, random_length(case))
    results = []
    for kept in (False, True):
        torch.manual_seed(5)
        flags = {"checkpoint_activations": kept, "recompute": recompute, "dropout": 0.2, "attention_dropout": 0.3}
        model = build(arch, {**case.flags, **flags}, words)
        model.train()
        torch.manual_seed(7)
        logits = model(tokens)[0]
        results.append(torch.autograd.grad(logits.square().sum(), model.decoder.core.embed.words.weight)[0])
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reconstruction_loss_equals_the_loops_and_trains_the_compression_alone(seed: int) -> None:
    case = exact_case("compressive_transformer", seed)
    model = case.model.train()
    drop_nothing(model)
    length = model.decoder.core.segment_len
    tokens = case.tokens(2, case.rng.randint(1, 4) * length)
    loss = model(tokens)[1]["auxiliary_loss"].mean()
    weight = model.decoder.core.config.reconstruction_loss_weight
    losses = [references.compressive_transformer(weights_of(model), case.flags, row.tolist())[1] for row in tokens]
    naive = torch.stack(losses).mean() * weight
    torch.testing.assert_close(loss, naive, rtol=EXACT, atol=EXACT)
    names, parameters = zip(*model.named_parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    expected = torch.autograd.grad(naive, parameters, allow_unused=True)
    for name, grad, other in zip(names, grads, expected):
        assert (grad is not None) == ("compress" in name), name
        if grad is not None:
            torch.testing.assert_close(grad, other, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    ("arch", "flags", "sentence"),
    [
        ("transformer_xl", {"tokens_per_sample": 0}, "--tokens-per-sample must be at least 1"),
        ("transformer_ql", {"tokens_per_sample": 5}, "--tokens-per-sample must be a multiple of the coarsest scale"),
        ("compressive_transformer", {"tokens_per_sample": 7}, "must .*divide --tokens-per-sample 7: got 2"),
    ],
)
def test_a_flag_that_breaks_a_rule_is_named_in_one_sentence(arch: str, flags: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build(arch, {"tokens_per_sample": 8, **flags}, dictionary(5))


def test_post_ln_over_an_empty_memory_is_warned_of(caplog) -> None:
    sizes = {"decoder_embed_dim": 8, "decoder_attention_heads": 2, "tokens_per_sample": 8, "mem_len": 8}
    said, largest = {}, {}
    for before in (False, True):
        caplog.clear()
        model = build("transformer_ql", {**sizes, "decoder_normalize_before": before}, dictionary(9))
        said[before] = "set --decoder-normalize-before" in caplog.text
        model.decoder.core.stream(torch.randint(4, 13, (2, 8)), None)[0].pow(2).sum().backward()
        largest[before] = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    assert said == {False: True, True: False}
    # Why: without a single token in them, the coarse scales' rows are zeros. Post-LN, one layer norm after another
    # multiplies their gradient by 316, pre-LN the only one on their way, after the scale.
    assert largest[False] > 1e9 > 1e3 > largest[True]
