"""Models with a memory in plain PyTorch: states that train, decode, go back and are handed on."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms import core
from fairseq_ms.core.stream_state import WHOLE, Mems, Pasts
from fairseq_ms.core.streaming import RelativeAttention, StreamingModel
from tests.helpers.gradients import assert_same_with_gradients

VOCABULARY = 13
# float64; sums of a few hundred terms of order 1, through at most seven layers.
EXACT: Any = {"rtol": 1e-9, "atol": 1e-9}
MODELS = ["TransformerXL", "CompressiveTransformer", "TransformerQL"]


def model_of(name: str, seed: int, **settings: Any) -> StreamingModel:
    """A small model with large weights, in double precision."""
    rng = random.Random(f"{name} {seed}")
    sizes: dict[str, Any] = {"dim": 8, "ffn_dim": 12, "heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
    sizes |= {"vocab_size": VOCABULARY, "init_std": 0.4, "normalize_before": rng.random() < 0.5}
    sizes |= {"segment_len": 4 * rng.randint(1, 2), "mem_len": rng.choice([0, 3, 4, 10])}
    if name == "TransformerQL":
        sizes |= {"scales": tuple(core.Scale(2**n, 1) for n in range(rng.randint(1, 3))), "output_layers": 1}
        sizes["mem_len"] = max(sizes["mem_len"], 1)
    else:
        sizes["layers"] = 2
    if name == "CompressiveTransformer":
        sizes |= {"compressed_mem_len": rng.randint(0, 5)}
    torch.manual_seed(seed)
    return getattr(core, name)(getattr(core, f"{name}Config")(**{**sizes, **settings})).double()


def tokens_of(rows: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length))


def cuts(rng: random.Random, length: int) -> list[int]:
    """Lengths of pieces."""
    pieces: list[int] = []
    while sum(pieces) < length:
        pieces.append(rng.randint(1, min(9, length - sum(pieces))))
    return pieces


@pytest.mark.parametrize("name", MODELS)
def test_all_layers_attend_by_the_same_u_and_v(name: str) -> None:
    model = model_of(name, 1)
    layers = [module for module in model.modules() if isinstance(module, RelativeAttention)]
    assert len(layers) > 1
    assert all(layer.u is model.u and layer.v is model.v for layer in layers)
    assert sum(name.endswith(("u", "v")) for name, _ in model.named_parameters()) == 2


@pytest.mark.parametrize("name", MODELS)
def test_a_state_goes_on_by_the_weights_of_today(name: str) -> None:
    """Its segment began by others, and in training, whose dropout it must not keep."""
    model, tokens = model_of(name, 1, segment_len=4, dropout=0.3), tokens_of(2, 30)
    state = model.new_state(2)
    with torch.no_grad():
        model.train()(tokens[:, :6], state)
        model.eval()(tokens[:, 6:8], state)
        for parameter in model.parameters():
            parameter.add_(0.1)
        other = model.new_state(2, memory=state.memory)
        for start in range(8, 30, 3):
            piece = tokens[:, start : start + 3]
            torch.testing.assert_close(model(piece, state)[0], model(piece, other)[0], **EXACT)


@pytest.mark.parametrize("name", MODELS)
def test_no_tokens_have_no_features(name: str) -> None:
    assert model_of(name, 1).features(tokens_of(2, 0)).shape == (2, 0, 8)


@pytest.mark.parametrize("name", MODELS)
def test_whole_segments_of_a_prompt_run_in_one_pass_and_an_unfinished_one_is_continued(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name, 0, segment_len=4, mem_len=4)
    tokens = tokens_of(2, 17)
    expected = model.features(tokens)
    whole, in_one_pass = model.forward_segment, []

    def counted(x_BTD: Tensor, mems: Mems, positions: Tensor, pasts: Pasts = WHOLE) -> tuple[Tensor, Mems]:
        if not pasts:
            in_one_pass.append(x_BTD.size(1))
        return whole(x_BTD, mems, positions, pasts)

    monkeypatch.setattr(model, "forward_segment", counted)
    state = model.new_state(2, 17)
    with torch.no_grad():
        features = [model.features(part, state) for part in tokens.split([10, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(features, dim=1), expected, **EXACT)
    # Tokens 8 to 11 come in three pieces, and the last token is not a segment.
    assert in_one_pass == [4, 4, 4]
    assert state.length == 17


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MODELS)
def test_calls_with_and_without_gradients_continue_one_state(name: str, seed: int) -> None:
    model, rng = model_of(name, seed), random.Random(seed)
    tokens = tokens_of(2, 40)
    expected, _ = model(tokens)
    state: Any = None
    logits = []
    for piece in tokens.split(cuts(rng, 40), dim=1):
        with torch.set_grad_enabled(rng.random() < 0.5):
            some, state = model(piece, state)
        logits.append(some)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, **EXACT)
    assert state.length == 40
    # What the state knows can be handed on.
    more = tokens_of(2, 11)
    other = model.new_state(2, memory=core.Memory.from_state_dict(state.memory.state_dict()))
    torch.testing.assert_close(model(more, other)[0], model(more, state)[0], **EXACT)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", MODELS)
def test_pieces_reorders_and_going_back_leave_the_features_of_the_whole(name: str, seed: int) -> None:
    model, rng = model_of(name, seed), random.Random(seed)
    first, read = tokens_of(3, rng.randint(1, 20)), tokens_of(3, 0)
    with torch.no_grad():
        _, memory, _ = model.stream(first, None)
        state = model.new_state(3, memory=memory)
        for _ in range(14):
            rows = read.size(0)
            choice = rng.random()
            if choice < 0.25:
                order = torch.tensor([rng.randrange(rows) for _ in range(rng.randint(1, 4))])
                state.reorder(order)
                first, read = first[order], read[order]
            elif choice < 0.4:
                read = read[:, : rng.randint(0, read.size(1))]
                state.truncate(read.size(1))
            else:
                more = tokens_of(rows, rng.choice([1, 1, 2, 5, 11]))
                found = model.features(more, state)
                read = torch.cat([read, more], dim=1)
                expected = model.features(torch.cat([first, read], dim=1))[:, -more.size(1) :]
                torch.testing.assert_close(found, expected, **EXACT)
            assert state.length == read.size(1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_a_loss_behind_a_state_is_that_of_the_logits_and_trains_on_its_own_tokens(name: str, seed: int) -> None:
    model = model_of(name, seed).train()
    length = model.segment_len
    tokens, targets = tokens_of(2, 3 * length), tokens_of(2, 3 * length)
    targets[1, -2:] = -100
    _, memory, _ = model.stream(tokens[:, :length], None)
    x_BTD, _, auxiliary_B = model.stream(tokens[:, length:], memory)
    expected = F.cross_entropy(model.logits(x_BTD).flatten(0, 1), targets[:, length:].flatten())
    if auxiliary_B is not None:
        # A row counts as its targets do.
        shares_B = torch.tensor([2 * length, 2 * length - 2]) / (4 * length - 2)
        expected = expected + (auxiliary_B * shares_B).sum()
    state = model.new_state(2)
    # The first call's graph is gone when the second's gradients are taken.
    model.loss(tokens[:, :length], targets[:, :length], state=state).backward()
    loss = model.loss(tokens[:, length:], targets[:, length:], state=state)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    naive = torch.autograd.grad(expected, parameters, allow_unused=True)
    for one, other in zip(found, naive):
        assert (one is None or not one.any()) == (other is None or not other.any())
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_padding_on_the_right_changes_no_loss_of_a_memory() -> None:
    """Nor its gradients: a batch has the losses of its rows alone, each counted as often as it has targets."""
    model = model_of("CompressiveTransformer", 0, segment_len=4, padding_idx=1).train()
    rows = [torch.randint(2, VOCABULARY, (1, length + 1)) for length in (23, 13, 4)]
    padded = torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True, padding_value=1)
    found = model.loss(padded[:, :-1], padded[:, 1:], ignore_index=1)
    alone = [model.loss(row[:, :-1], row[:, 1:]) * (row.size(1) - 1) for row in rows]
    assert_same_with_gradients(found, torch.stack(alone).sum() / 40, list(model.parameters()), 1e-12)


def test_a_state_cannot_go_back_behind_what_was_trained_on() -> None:
    model = model_of("TransformerXL", 0)
    _, state = model(tokens_of(1, 5))
    for length in (4, -1):
        with pytest.raises(core.cache.CannotTruncate):
            state.truncate(length)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_caller_may_write_into_tokens_that_a_state_has_read(name: str) -> None:
    model, tokens, buffer = model_of(name, 1).eval(), tokens_of(2, 23), tokens_of(2, 1)
    state = model.new_state(2)
    for column in tokens[:, :21].split(1, dim=1):
        model(buffer.copy_(column), state)
    buffer.fill_(0)
    # To go back is to read again.
    state.truncate(19)
    torch.testing.assert_close(model(tokens[:, 19:], state)[0], model(tokens)[0][:, 19:], **EXACT)
