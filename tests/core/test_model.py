"""Models of the core as a user of PyTorch calls them: logits, states, loss, text, and what is refused."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fairseq_ms import core
from fairseq_ms.core.ops.linear import SomeSymbols
from fairseq_ms.core.sampling import draw
from fairseq_ms.core.streaming import StreamingModel
from tests.helpers.cli import ROOT
from tests.helpers.gradients import gradients
from tests.helpers.operations import Operations

# A name and what follows a comma: windows of another kind.
WINDOWS: dict[str, Any] = {
    "Retina, groups": (core.Scale(1, far=8, heads=4), core.Scale(1, far=24, heads=8)),
    "Retina, open": (core.Scale(1, far=5, heads=3), core.Scale(1, heads=5), core.Scale(4, near=4, heads=4)),
    "Retina, blocks": (core.Scale(1, far=8, heads=2), core.Scale(4, near=8, far=24, heads=10)),
    "Retina, turns": ((core.Scale(1, far=8), core.Scale(2, near=8, far=16)), (core.Scale(1),)),
}
NAMES = [name[:-6] for name in core.__all__ if name.endswith("Config") and name != "ModelConfig"] + [*WINDOWS]
SIZES = {"dim": 24, "ffn_dim": 32, "heads": 12, "max_positions": 64, "init_std": 0.3}
ADAPTIVE = {"adaptive_input": core.Bands((4, 7), 2.0), "adaptive_softmax": core.Bands((4, 7), 2.0)}


def build(name: str, **changes: Any) -> core.LanguageModel:
    """A small model in evaluation mode, always of the same weights."""
    torch.manual_seed(1)
    own: dict[str, Any] = {"separators": (3,)} if name in ("HAED", "HRED") else SIZES
    windows, kind = {"scales": WINDOWS[name]} if name in WINDOWS else {}, name.split(",")[0]
    config = getattr(core, f"{kind}Config")(**{"vocab_size": 11, **own, **windows, **changes})
    model = getattr(core, kind)(config)
    for parameter_name, parameter in model.named_parameters():
        if ".short_conv." in parameter_name or ".sinks" in parameter_name:  # which are zero before training
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def in_pieces(model: core.LanguageModel, tokens_BT: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    """The logits of a text that is read in pieces of these lengths."""
    state, parts = None, []
    for piece in tokens_BT.split(pieces, dim=1):
        logits, state = model(piece, state)
        parts.append(logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_in_any_pieces_has_the_logits_of_the_whole(name: str) -> None:
    model, tokens = build(name).double(), torch.randint(11, (3, 41))
    with torch.no_grad():
        whole, _ = model(tokens)
        for pieces in ([1] * 41, [7, 1, 20, 13], [40, 1]):
            # float64: sums in another order.
            torch.testing.assert_close(in_pieces(model, tokens, pieces), whole, rtol=0.0, atol=1e-9)
        _, state = model(tokens[:, :9])
        loss = model.loss(tokens[:, 9:], tokens[:, 9:].clamp(max=9), ignore_index=9, state=state)
    targets = tokens[:, 9:].clamp(max=9).flatten()
    expected = F.cross_entropy(whole[:, 9:].flatten(0, 1), targets, ignore_index=9)
    torch.testing.assert_close(loss, expected, rtol=0.0, atol=1e-9)
    assert state.length == 41


@pytest.mark.parametrize("tied", [True, False])
def test_symbols_that_are_never_predicted_take_no_probability_from_others(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = {"dropout": 0.0, "attention_dropout": 0.0}
    model, tokens = build("Vanilla", unpredicted=(0, 3), tie_embeddings=tied, **still), torch.randint(11, (2, 9))
    plain, targets = build("Vanilla", tie_embeddings=tied), tokens.masked_fill((tokens == 0) | (tokens == 3), -100)
    plain.load_state_dict({name.replace("project.project", "project"): x for name, x in model.state_dict().items()})
    with torch.no_grad():
        logits, expected = model(tokens)[0], plain(tokens)[0]
    expected[..., [0, 3]] = -torch.inf
    torch.testing.assert_close(logits.softmax(-1), expected.softmax(-1), rtol=0.0, atol=1e-6)
    assert logits.isfinite().all()
    of_logits = F.cross_entropy(model(tokens)[0].flatten(0, 1), targets.flatten())
    torch.testing.assert_close(of_logits, F.cross_entropy(expected.flatten(0, 1), targets.flatten()))
    wanted = [of_logits, *gradients(of_logits, [*model.parameters()])]
    # The module would hold all logits at once.
    monkeypatch.setattr(SomeSymbols, "forward", None)
    loss = model.loss(tokens, targets)
    torch.testing.assert_close([loss, *gradients(loss, [*model.parameters()])], wanted, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(model.loss(tokens, targets, state=model.new_state(2)), of_logits)
    monkeypatch.undo()
    assert not {0, 3} & {
        *model.generate(tokens, 50, generator=torch.Generator().manual_seed(1))[:, 9:].flatten().tolist()
    }


@pytest.mark.parametrize("name", ["Vanilla", "TopDown", "BottomUp", "CoarseLM", "Retina, groups", "Retina, open"])
def test_heads_of_keys_as_many_as_of_queries_change_nothing_and_fewer_are_read_from_caches(name: str) -> None:
    tokens = torch.randint(11, (2, 23))
    model, same = build(name), build(name, kv_heads=12)
    assert {key: x.shape for key, x in model.state_dict().items()} == {k: x.shape for k, x in same.state_dict().items()}
    assert torch.equal(model(tokens)[0], same(tokens)[0])
    fewer = build(name, kv_heads=12 if name == "Retina, open" else 3).double()
    state = fewer.new_state(2)
    with torch.no_grad():
        pieces = [fewer(piece, state)[0] for piece in tokens.split([7, 1, 1, 14], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), fewer(tokens)[0], rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_is_too_long_is_refused_by_naming_what_has_no_limit(name: str) -> None:
    tokens = torch.zeros(1, 2000, dtype=torch.long)
    model = build(name)
    if model.max_length() is None:
        return
    with pytest.raises(ValueError, match=r'\(positions="rotary" has no limit\): got'):
        model(tokens)
    assert build(name, positions="rotary").max_length() is None


@pytest.mark.parametrize("name", NAMES)
def test_a_reordered_state_continues_other_rows(name: str) -> None:
    model, tokens, order = build(name).double(), torch.randint(11, (3, 30)), torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        whole, _ = model(tokens[order])
        _, unread = model(tokens[:, :17])
        state = model.new_state(3, 4)
        model.features(tokens[:, :17], state)
        for one in (unread, state):
            one.reorder(order)
            logits, _ = model(tokens[order][:, 17:], one)
            torch.testing.assert_close(logits, whole[:, 17:], rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_and_its_gradients_are_those_of_cross_entropy(name: str) -> None:
    tokens, targets = torch.randint(11, (2, 21)), torch.randint(11, (2, 21))
    targets[0, 5:9] = -100
    results = []
    for by_logits in (False, True):
        model = build(name).double()
        if by_logits:
            loss = F.cross_entropy(model(tokens)[0].flatten(0, 1), targets.flatten())
        else:
            loss = model.loss(tokens, targets)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_that_is_a_module_has_its_gradients_averaged_over_processes(name: str, one_process: None) -> None:
    """Which that of the model inside does not: a wrapper knows of its own forward pass alone."""
    model, (tokens, targets), buckets = build(name).train(), torch.randint(11, (2, 2, 21)), list[int]()

    def average(_: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.index())
        done = torch.futures.Future[torch.Tensor]()
        done.set_result(bucket.buffer().mul_(2.0))
        return done

    ddp = torch.nn.parallel.DistributedDataParallel(core.Loss(model))
    ddp.register_comm_hook(None, average)
    torch.manual_seed(1)  # of dropout
    loss = ddp(tokens, targets)
    loss.backward()
    assert buckets
    found = [parameter.grad / 2.0 for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    torch.manual_seed(1)
    (own := model.loss(tokens, targets)).backward()
    assert own.equal(loss)
    torch.testing.assert_close(found, [p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("tied", [False, True])
def test_with_adaptive_softmax_logits_are_log_probabilities_and_the_loss_theirs(tied: bool) -> None:
    model = build("Vanilla", layers=1, **ADAPTIVE, tie_adaptive_weights=tied).double()
    tokens, targets = torch.randint(11, (2, 21)), torch.randint(11, (2, 21))
    targets[1, 3:] = -100
    logits, _ = model(tokens)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 21, dtype=torch.float64))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(tokens, targets), expected, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_generation_at_temperature_zero_takes_the_most_probable_token(name: str) -> None:
    model, prompt = build(name).double(), torch.randint(11, (2, 5))
    text = model.generate(prompt, 14, temperature=0.0)
    assert text[:, :5].equal(prompt)
    with torch.no_grad():
        assert model(text)[0][:, 4:-1].argmax(-1).equal(text[:, 5:])
    assert model.generate(prompt[0], 14, temperature=0.0).equal(text[0])
    # Divided by these, logits are not finite in float32, or rounded to whole numbers.
    for temperature in (1e-320, 1e-40, 9e-7):
        assert model.generate(prompt, 14, temperature).equal(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_grows_to_the_longest_there_is_and_no_further(name: str) -> None:
    """Whose last token is drawn and not read."""
    model, prompt = build(name, max_positions=24), torch.randint(11, (2, 5))
    most = model.max_length()
    if most is None:
        return
    for known in (0, 3):
        state = model(prompt[:, :known])[1] if known else None
        rest = most - known - 4
        with pytest.raises(ValueError, match=f"got {most + 1}$"):
            model.generate(prompt, rest + 1, state=state)
        assert model.generate(prompt, rest, state=state).size(1) == 5 + rest
        assert state is None or state.length == most


@pytest.mark.parametrize("name", NAMES)
def test_each_prompt_of_a_list_has_the_text_that_it_has_alone(name: str) -> None:
    model, prompts = build(name).double(), [torch.randint(11, (count,)) for count in (17, 1, 5, 17)]
    texts = model.generate(prompts, 14, temperature=0.0)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.equal(model.generate(prompt, 14, temperature=0.0))
    # What ends a text ends none that has it in its prompt.
    ends = model.generate(prompts, 14, temperature=0.0, eos_idx=(end := int(texts[0][-1])))
    for prompt, text in zip(prompts, ends, strict=True):
        alone = model.generate(prompt, 14, temperature=0.0, eos_idx=end)
        assert text[: len(alone)].equal(alone)
        assert (text[len(alone) :] == end).all()


@pytest.mark.parametrize("name", NAMES)
def test_logits_that_are_not_finite_draw_no_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = build(name), torch.randint(11, (2, 5))
    logits = model.logits
    for step, (temperature, value) in enumerate([(0.0, "nan"), (1.0, "inf"), (1.0, "nan"), (0.0, "-inf")]):
        # Once, in one of two rows: later steps may know nothing of it.
        values = iter([0.0] * step + [float(value)] + [0.0] * (3 - step))

        def spoilt(x_BTD: torch.Tensor, values: Iterator[float] = values) -> torch.Tensor:
            return logits(x_BTD).index_fill(0, torch.tensor([1]), next(values))

        monkeypatch.setattr(model, "logits", spoilt)
        with pytest.raises(ValueError, match="logits must be finite"):
            model.generate(prompt, 4, temperature)


def test_nothing_looks_at_the_numbers_of_a_text_before_its_end() -> None:
    model, prompt = build("Vanilla"), torch.randint(11, (2, 5))
    with Operations() as ran:
        model.generate(prompt, 9)
    assert ran.names.count("aten::_local_scalar_dense") == 1


def test_sampling_draws_from_the_most_probable_tokens_alone_and_repeats_with_its_generator() -> None:
    model, prompt = build("Vanilla", layers=1).double(), torch.randint(11, (400, 1))
    with torch.no_grad():
        probs = model(prompt)[0][:, -1].softmax(-1)
    drawn = [model.generate(prompt, 1, top_k=3, generator=torch.Generator().manual_seed(5))[:, 1] for _ in range(2)]
    assert drawn[0].equal(drawn[1])
    assert bool((probs.topk(3).indices == drawn[0][:, None]).any(-1).all())
    assert len({*drawn[0].tolist()}) > 3
    # Equally probable symbols are no more than were asked for.
    assert len(draw(torch.zeros(400, 11), 1.0, 2, 1.0, None).unique()) == 2
    nucleus = model.generate(prompt, 1, top_p=0.3)[:, 1:]
    before = probs.masked_fill(probs <= probs.gather(1, nucleus), 0.0).sum(-1)
    assert bool((before < 0.3).all())


@pytest.mark.parametrize("name", ["Vanilla", "TransformerQL", "HAED"])
def test_a_text_ends_with_the_symbol_that_ends_texts_and_generation_with_its_longest(name: str) -> None:
    model, prompt, seed = build(name).double(), torch.randint(11, (4, 5)), torch.Generator().manual_seed(5)
    prompt[0, -1] = 2  # which ends what came before it
    state = model.new_state(4)
    text = model.generate(prompt, 59, 9.0, eos_idx=2, state=state, generator=seed)
    length = text.size(1)
    assert 6 < length < 64
    assert state.length == length - 1
    free = model.generate(prompt, length - 5, 9.0, generator=torch.Generator().manual_seed(5))
    ends = []
    for row, other in zip(text.tolist(), free.tolist()):
        end = row.index(2, 5)
        # What a text draws does not depend on its end; after it, there is nothing else.
        assert row[: end + 1] == other[: end + 1]
        assert row[end:] == [2] * (length - end)
        ends.append(end)
    assert length == max(ends) + 1 > min(ends) + 1


def test_generation_continues_a_state_and_leaves_the_mode_of_the_model() -> None:
    model: Any = build("Retina").double().train()
    prompt = torch.randint(11, (2, 20))
    whole = model.generate(prompt, 9, temperature=0.0)
    state = model.new_state(2)
    with torch.no_grad():
        model.eval().features(prompt[:, :13], state)
    model.train().embed.eval()
    assert model.generate(prompt[:, 13:], 9, temperature=0.0, state=state).equal(whole[:, 13:])
    assert model.training
    assert not model.embed.training


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CoarseLM"])
def test_the_state_of_a_text_read_without_one_moves_on_and_is_generated_from(name: str) -> None:
    model, text = build(name).double(), torch.randint(11, (2, 30))
    with torch.no_grad():
        whole, (_, state) = model(text)[0], model(text[:, :12])
        for begin, end in ((12, 13), (13, 20)):
            torch.testing.assert_close(model(text[:, begin:end], state)[0], whole[:, begin:end])
            assert state.length == end
    drawn = model.generate(text[:, 20:], 5, temperature=0.0, state=state)
    assert drawn.equal(model.generate(text, 5, temperature=0.0)[:, 20:])
    assert state.length == 34
    state.reorder(torch.tensor([1]))
    assert model(text[:1, :1], state)[0].shape == (1, 1, 11)


def test_a_state_goes_back_also_where_the_text_was_read_without_one() -> None:
    model, text = build("Vanilla").double(), torch.randint(11, (2, 30))
    with torch.no_grad():
        whole = model(text)[0]
        for continued in (False, True):
            _, state = model(text[:, :12])
            if continued:
                model(text[:, 12:20], state)
            state.truncate(9)
            torch.testing.assert_close(model(text[:, 9:20], state)[0], whole[:, 9:20])
        for length in (-1, 0, 21):
            _, unread = model(text[:, :12])
            with pytest.raises(core.cache.CannotTruncate, match=r"^length must be"):
                unread.truncate(length)
        for length in (-1, 21):
            with pytest.raises(core.cache.CannotTruncate, match=r"^length must be"):
                state.truncate(length)


@pytest.mark.parametrize("name", NAMES)
def test_generation_draws_allowed_symbols_and_stops_when_it_is_told(name: str) -> None:
    model, columns = build(name), list[torch.Tensor]()
    allowed = torch.zeros(11, dtype=torch.bool).index_fill(0, torch.tensor([3, 7, 9]), True)

    def stop(tokens_B1: torch.Tensor) -> bool:
        columns.append(tokens_B1)
        return len(columns) == 20

    prompt = torch.randint(11, (2, 5))
    text = model.generate(prompt, 40, 9.0, allowed=allowed, stop=stop)
    assert text.equal(torch.cat([prompt, *columns], dim=1))
    assert text.shape == (2, 25)
    assert set(text[:, 5:].flatten().tolist()) <= {3, 7, 9}


def test_a_longer_prompt_of_a_list_is_whole_where_generation_stops_within_it() -> None:
    model, prompts = build("Vanilla"), [torch.randint(11, (length,)) for length in (2, 9)]
    short, long = model.generate(prompts, 5, stop=lambda _: True)
    assert short.shape == (3,)
    assert long.equal(prompts[1])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_copy_of_a_state_goes_on_by_itself(name: str) -> None:
    model, tokens = build(name).eval(), torch.randint(11, (2, 24))
    for state in (model(tokens[:, :9])[1], model.new_state(2)):
        model(tokens[:, 9:14], state)
        branch = state.copy()
        model(tokens[:, :7], branch)
        branch = state.copy()
        expected = [model(token_B1, state)[0] for token_B1 in tokens[:, 14:].split(1, dim=1)]
        found = [model(token_B1, branch)[0] for token_B1 in tokens[:, 14:].split(1, dim=1)]
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
        assert branch.length == state.length


@pytest.mark.parametrize("name", NAMES)
def test_a_state_of_another_model_or_batch_size_is_refused(name: str) -> None:
    model, tokens = build(name), torch.randint(11, (2, 4))
    sizes = {"token_dim": 6} if name in ("HAED", "HRED") else {"ffn_dim": 40}
    other, third = build(name, **sizes), build("TransformerXL" if name == "Vanilla" else "Vanilla")
    begun = model(tokens[:, :2])[1]
    begun.reorder(torch.tensor([0, 1, 1]))
    others = [made for m in (other, third) for made in (m.new_state(2), m(tokens)[1])]
    for state in (*others, model.new_state(3), begun):
        with pytest.raises(ValueError, match=r"^state must be of "):
            model(tokens, state)
        with pytest.raises(ValueError, match=r"^state must be of "):
            model.generate(tokens, 3, state=state)
    if not isinstance(model, StreamingModel):  # whose states know their model
        model.generate(tokens, 3, state=build(name).new_state(2))


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_survives_json(name: str) -> None:
    config = build(name).config
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_lists_within_a_configuration_are_tuples() -> None:
    turns = [[core.Scale(1)], [core.Scale(1, far=8)]]
    config = core.RetinaConfig(vocab_size=11, layers=2, scales=turns)  # type: ignore[arg-type]
    assert hash(config) == hash(core.RetinaConfig.from_dict(config.to_dict()))
    assert config == core.RetinaConfig.from_dict(json.loads(json.dumps(config.to_dict())))


def test_a_bias_of_a_projection_to_some_symbols_is_in_the_loss() -> None:
    model, tokens = build("Vanilla", unpredicted=(0,), tie_embeddings=False), torch.randint(1, 11, (2, 9))
    model.project.project = torch.nn.Linear(24, 11)  # type: ignore[union-attr]
    logits = model(tokens)[0].flatten(0, 1)
    torch.testing.assert_close(model.loss(tokens, tokens), F.cross_entropy(logits, tokens.flatten()))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/core.md"])
def test_the_lines_of_the_documentation_run(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    programs = [block for block in blocks if "fairseq_ms.core" in block]
    assert programs
    given = "import torch\ntokens, targets = torch.randint(8000, (2, 2, 60))\nprompt = tokens[0, :9]\n"
    for program in programs:
        done = subprocess.run([sys.executable, "-c", given + program], cwd=ROOT, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
