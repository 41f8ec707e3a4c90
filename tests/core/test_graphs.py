"""Steps of fixed shapes: what CUDA graphs replay, shown without a GPU and, with ``--device cuda``, on one."""

import copy
import random
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_ms import core
from fairseq_ms.core.cache import State
from fairseq_ms.core.model import CausalModel
from fairseq_ms.core.sampling import draw
from fairseq_ms.core.steps import Reader, Steps, takes_graphs
from fairseq_ms.core.steps.buffers import FixedState
from tests.core.test_model import NAMES, build
from tests.helpers.graphs import Device, recorded
from tests.helpers.operations import Operations

CAPACITY, PROMPT, STEPS = 400, 13, 300
ROTARY: dict[str, Any] = {"positions": "rotary", "dim": 48, "qk_norm": "scaled", "short_conv": 3, "sinks": True}
SCALES = (core.Scale(1, 2), core.Scale(2, 1, heads=3), core.Scale(4, 1, heads=3), core.Scale(16, 1, heads=6))
GROUPS = (core.Scale(1, far=8, heads=4), core.Scale(1, far=64, heads=4), core.Scale(1, heads=4))
# A name, what differs from the usual sizes, and how many kinds of step there are.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "vanilla": ("Vanilla", {"normalize_before": False}, 1),
    "vanilla, rotary": ("Vanilla", ROTARY, 1),
    "vanilla, shared keys": ("Vanilla", {**ROTARY, "kv_heads": 1}, 1),
    "retina, blocks": ("Retina, blocks", {"downsampler": "max"}, 1),
    "retina, rotary": ("Retina", {**ROTARY, "downsampler": "conv", "normalize_before": False}, 1),
    "retina, groups": ("Retina, groups", ROTARY, 1),
    "retina, open": ("Retina, open", ROTARY, 1),
    "retina, turns": ("Retina, turns", {"downsampler": "max"}, 1),
    "retina, shared keys": ("Retina, groups", {**ROTARY, "kv_heads": 3}, 1),
    "topdown": ("TopDown", {"downsampler": "max", "scales": SCALES}, 4),
    "topdown, rotary": ("TopDown", {**ROTARY, "downsampler": "conv", "scales": SCALES}, 4),
    "bottomup": ("BottomUp", {"downsampler": "conv", "normalize_before": False, "scales": SCALES}, 4),
    "bottomup, rotary": ("BottomUp", {**ROTARY, "downsampler": "max", "scales": SCALES}, 4),
    "transformer-xl": ("TransformerXL", {"segment_len": 7, "mem_len": 9}, 2),
    "compressive": ("CompressiveTransformer", {"segment_len": 6, "mem_len": 4, "normalize_before": False}, 2),
}
__all__ = ["recorded"]  # a fixture
FIXED = sorted({name for name, _, _ in MODELS.values()})
every_model = pytest.mark.parametrize("which", MODELS)


def small(which: str) -> CausalModel:
    name, changes, _ = MODELS[which]
    layers = {} if "scales" in changes else {"layers": 2}
    return build(name, **{**layers, "max_positions": CAPACITY, **changes})


@pytest.fixture
def no_default_device() -> Iterator[torch.device]:
    """That of ``--device``, under which torch's compiler cannot follow ``Tensor.unflatten``."""
    # ``get_default_device`` of torch 2.6 and 2.9 fails where one has been set back to None.
    device = torch.empty(0).device
    torch.set_default_device(None)
    yield device
    torch.set_default_device(None if device.type == "cpu" else device)


def begun(model: CausalModel, tokens: Tensor) -> tuple[State, Steps]:
    """A state after the prompts in front of the tokens, and steps that continue it."""
    state = model.new_state(tokens.size(0))
    model.features(tokens[:, :PROMPT], state)
    return state, Steps(model, tokens.size(0), CAPACITY).begin(state)


def tensors(state: FixedState) -> list[Tensor]:
    """All that a state of fixed shapes carries from step to step."""
    parts: list[Any] = list(state.parts())
    parts += [part.before for part in parts if getattr(part, "before", None) is not None]
    return [state.position_1, *(part.buffer if hasattr(part, "buffer") else part.x for part in parts)]


def orders(rows: int, seed: int) -> Iterator[Tensor | None]:
    """An order of rows at every third step or so."""
    rng = random.Random(seed)
    while True:
        yield torch.tensor([rng.randrange(rows) for _ in range(rows)]) if rng.random() < 0.3 else None


@pytest.mark.slow
@every_model
@torch.no_grad()
def test_steps_of_fixed_shapes_are_those_of_caches_that_grow(which: str) -> None:
    model, tokens = small(which).double(), torch.randint(11, (3, PROMPT))
    state, steps = begun(model, tokens)
    places = [x.data_ptr() for x in tensors(steps.state)]
    for step, order in zip(range(STEPS), orders(3, 1)):
        if order is not None:
            steps.reorder(order)
            state.reorder(order)
        # Not what is drawn: of some weights, and other devices draw others, that is the same symbol again and again.
        token_B1 = torch.randint(11, (3, 1))
        found, expected = model.logits(steps(token_B1)), model.logits(model.features(token_B1, state))
        # float64: sums in another order.
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-9)
        seeds = [torch.Generator(found.device).manual_seed(step) for _ in range(2)]
        drawn = [draw(x[:, -1], 1.0, 0, 1.0, seed) for x, seed in zip((found, expected), seeds, strict=True)]
        assert drawn[0].equal(drawn[1])
    assert [x.data_ptr() for x in tensors(steps.state)] == places
    assert len(steps.graphs) == MODELS[which][2]
    if steps.tokens_B1.is_cuda:
        assert all(steps.graphs.values())


@pytest.mark.slow
@every_model
@torch.no_grad()
def test_the_compiler_sees_no_more_graphs_than_there_are_kinds_of_step(
    which: str, no_default_device: torch.device
) -> None:
    model = small(which).double().to(no_default_device)
    tokens = torch.randint(11, (2, CAPACITY), device=no_default_device)
    state, steps = begun(model, tokens)
    counted = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(steps.step, backend=counted, fullgraph=True, dynamic=False)
    steps.run = compiled  # type: ignore[method-assign]
    for index, column in enumerate(tokens[:, PROMPT : PROMPT + 150].split(1, dim=1)):
        # All blocks have ended within so many steps.
        torch._dynamo.config.error_on_recompile = index >= 70
        torch.testing.assert_close(steps(column), model.features(column, state), rtol=0.0, atol=1e-9)
    torch._dynamo.config.error_on_recompile = False
    assert counted.frame_count == MODELS[which][2]


@every_model
@torch.no_grad()
def test_nothing_in_a_step_waits_for_the_device(which: str) -> None:
    # Tensors without numbers: whatever has to know one, or how many there are, raises an error. Without a driver, torch
    # cannot index even those of a GPU.
    device = "cuda" if torch.cuda.is_available() else "meta"
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        model = small(which)
        steps = Steps(model, 2, CAPACITY)
        for kind in {steps.state.kind(length) for length in range(1, 65)}:
            token_B1 = draw(model.logits(steps.step(kind))[:, -1], 0.7, 5, 0.9, None)
            steps.tokens_B1.copy_(token_B1)
            steps.reorder(torch.zeros(2, dtype=torch.long))
            assert token_B1.device.type == device


@pytest.mark.parametrize(
    ("scales", "parts", "writes", "calls", "ratio"),
    [
        (core.RetinaConfig.scales, {}, 24, 12, 1.65),
        (core.RetinaConfig.scales, {"positions": "rotary", "dim": 48, "qk_norm": "scaled"}, 24, 12, 1.3),
        (GROUPS, {}, 12, 24, 1.65),
    ],
    ids=["paper's", "rotary", "one wide"],
)
@torch.no_grad()
def test_a_step_writes_all_windows_of_a_layer_at_once_and_reads_small_ones_together(
    scales: Any, parts: dict[str, Any], writes: int, calls: int, ratio: float
) -> None:
    found = []
    for name, changes in (("Vanilla", parts), ("Retina", {"scales": scales, **parts})):
        steps = Steps(build(name, layers=12, max_positions=CAPACITY, **changes), 1, CAPACITY)
        with Operations() as operations:
            steps.step(-1)
        found.append(Counter(operations.kernels))
    vanilla, retina = found
    assert (vanilla["index_copy_"], retina["index_copy_"]) == (12, writes)
    assert sum(count for name, count in retina.items() if "attention" in name) == calls
    assert retina.total() <= ratio * vanilla.total()


@pytest.mark.parametrize("name", FIXED)
def test_generation_with_steps_of_fixed_shapes_draws_what_it_draws_without(name: str, recorded: Device) -> None:
    model, prompt = build(name, max_positions=128).double(), torch.randint(11, (2, 5))
    for n, rows, eos_idx in ((1, 2, None), (2, 2, None), (60, 2, None), (30, 1, None), (40, 2, 2)):
        seeds = [torch.Generator(prompt.device).manual_seed(3) for _ in range(2)]
        # More text than the first had, of weights that have moved, after a state of the caller's.
        states = [model.new_state(rows), model.new_state(rows)]
        texts = [
            model.generate(prompt[:rows], n, 3.0, state=state, generator=seed, graphs=with_graphs, eos_idx=eos_idx)
            for with_graphs, state, seed in zip((False, True), states, seeds, strict=True)
        ]
        assert texts[0].equal(texts[1])
        if n > 1:
            assert model.steps is not None
            logits = [model(prompt[:rows, :1], state)[0] for state in states]
            torch.testing.assert_close(*logits, rtol=0.0, atol=1e-9)
        with torch.no_grad():
            next(model.parameters()).mul_(1.1)
    assert copy.deepcopy(model).steps is None
    # The longest text that there can be takes over the buffers of the one before.
    kept = []
    for _ in range(2):
        model.generate(prompt[:1, :4], 125)
        kept.append(model.steps)
    assert kept[0] is kept[1]


@pytest.mark.parametrize("name", FIXED)
@torch.no_grad()
def test_a_reader_gives_what_a_state_gives_whatever_it_reads_and_in_any_order_of_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.empty(0).device.type != "cuda":
        monkeypatch.setattr("fairseq_ms.core.steps.replay.takes_graphs", lambda model, graphs: graphs is None)
    # Soon full, so that others begin.
    monkeypatch.setattr("fairseq_ms.core.steps.replay._LEAST_ROOM", 16)
    model: Any = build(name, max_positions=80).double().eval()
    state, reader, by_steps = model.new_state(3), Reader(model, model.new_state(3)), 0

    def read(count: int) -> None:
        nonlocal by_steps
        tokens = torch.randint(11, (state.batch_size, count))
        # float64: sums in another order.
        torch.testing.assert_close(reader(tokens), model.features(tokens, state), rtol=0.0, atol=1e-9)
        by_steps += reader.steps is not None
        assert reader.length == state.length

    for order in ([0, 1, 2], [2, 0], [1, 1], [0, 1, 0, 1], [3], [0, 0]):
        for each in (state, reader):
            each.reorder(torch.tensor(order))
        for count in (4, *[1] * (3 if by_steps else 14)):
            read(count)
        branch = copy.deepcopy(reader) if len(order) == 2 else reader.copy()
        assert branch.model is model
        branch(torch.randint(11, (len(order), 2)))
        read(1)
        for each in (state, reader):
            each.reorder(torch.arange(len(order)).flip(0))
        read(1)
    # But where there was no room, and never with gradients, which steps have none of.
    assert by_steps > 20
    with torch.enable_grad():
        read(1)
    assert reader.steps is None
    read(1)
    kept, rows = reader.steps, state.batch_size
    del reader, each
    assert model.steps is kept
    (reader := Reader(model, model.new_state(rows)))(torch.randint(11, (rows, 3)))
    reader(torch.randint(11, (rows, 1)))
    assert reader.steps is kept


@torch.no_grad()
def test_a_caller_may_write_into_tokens_that_a_reader_has_read(recorded: Device) -> None:
    model, tokens, buffer = build("Vanilla").double(), torch.randint(11, (2, 12)), torch.zeros(2, 1, dtype=torch.long)
    reader = Reader(model, model.new_state(2), True)
    reader(tokens[:, :3])
    for column in tokens[:, 3:10].split(1, dim=1):
        reader(buffer.copy_(column))
    buffer.zero_()
    found = model.logits(reader(tokens[:, 10:]))
    torch.testing.assert_close(found, model(tokens)[0][:, 10:], rtol=0.0, atol=1e-9)


def test_steps_refuse_other_rows_than_they_have_and_a_text_for_which_there_is_no_room() -> None:
    steps, token = Steps(build("Vanilla"), 3, 2), torch.zeros(3, 1, dtype=torch.long)
    steps(token)
    with pytest.raises(ValueError, match=r"state must be of the batch size of the tokens 1: got 3$"):
        steps(token[:1])
    steps(token)
    with pytest.raises(ValueError, match=r"a text must have at most 2 tokens, for which its state has room: got 3$"):
        steps(token)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        *((name, {}, "on cpu: CUDA graphs need a GPU") for name in FIXED),
        *((name, {}, f"with {name}, which has no steps of fixed shapes") for name in NAMES if name not in FIXED),
        ("Vanilla", {"adaptive_input": core.Bands((4, 7)), "tie_embeddings": False}, "with an adaptive input, which"),
    ],
)
def test_graphs_are_refused_where_a_step_cannot_be_one(name: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"graphs must not be True {why}.*: got True"):
        build(name, **changes).generate(torch.zeros(1, 1, dtype=torch.long), 1, graphs=True)


def test_graphs_are_taken_unless_the_environment_or_hooks_forbid_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fairseq_ms.core.steps.replay.has_graphs", lambda device: True)
    prompt, called = torch.zeros(1, 3, dtype=torch.long), list[None]()
    model: Any = build("Vanilla")
    for value, taken in (("0", False), ("1", True)):
        monkeypatch.setenv("FAIRSEQ_MS_GRAPHS", value)
        assert takes_graphs(model, None) == taken
        assert takes_graphs(model, True)
    hook = model.get_submodule("stack.layers.0.ffn.up").register_forward_hook(lambda *_: called.append(None))
    with pytest.raises(ValueError, match="graphs must not be True with hooks"):
        model.generate(prompt, 5, graphs=True)
    model.generate(prompt, 5, graphs=None)
    assert len(called) == 5
    hook.remove()
    assert takes_graphs(model, None)


@every_model
def test_a_text_that_is_not_finite_leaves_nothing_in_the_next_one(which: str, recorded: Device) -> None:
    model: Any = small(which).double()
    # After a whole segment, nothing is loaded where the next one will be.
    prompt = torch.randint(11, (2, getattr(model, "segment_len", 5)))
    weights = [*model.parameters()]
    for graphs in (False, True):
        expected = model.generate(prompt, 16, 0.0, graphs=False)
        kept = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.fill_(torch.nan)
            with pytest.raises(ValueError, match="logits must be finite"):
                model.generate(prompt, 40, graphs=graphs)
            for weight, own in zip(weights, kept, strict=True):
                weight.copy_(own)
        steps = model.steps
        assert model.generate(prompt, 16, 0.0, graphs=graphs).equal(expected)
        assert model.steps is steps


def test_graphs_are_captured_on_a_stream_of_the_device_of_their_model(recorded: Device) -> None:
    steps: Any = Steps(build("Vanilla"), 1, 8)
    steps.tokens_B1, steps.step = torch.empty(0, 1), lambda kind: torch.empty(0)

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:1")

    steps.tokens_B1 = steps.tokens_B1.as_subclass(Elsewhere)
    for kind in (0, 0, 1, 1):
        steps.run(kind)
    device, stream, pool, mode = recorded.captures[0]
    assert (device, stream, mode) == (torch.device("cuda:1"), "captures of cuda:1", "thread_local")
    assert recorded.captures[1] == (device, stream, pool, mode)


class Scaled(torch.nn.Module):
    """An adapter as libraries have them: numbers and switches that a forward pass asks for."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base, self.scaling, self.disabled, self.active = base, {"own": 0.5}, False, ["own"]

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.disabled else y + sum(self.scaling[name] for name in self.active) * y.cos()


def test_what_a_graph_has_read_of_a_model_is_read_again_where_it_is_another(recorded: Device) -> None:
    model: Any = build("Vanilla", layers=1).double()
    prompt, found = torch.randint(11, (1, 5)), list[Tensor]()
    layer = model.get_submodule("stack.layers.0")
    layer.ffn.up = adapter = Scaled(layer.ffn.up)

    def replace() -> None:
        layer.attention.norm = torch.nn.RMSNorm(24, dtype=torch.float64)

    changes = [
        lambda: None,
        lambda: setattr(layer.attention.norm, "eps", 0.5),
        lambda: adapter.scaling.update(own=-3.0),
        lambda: setattr(adapter, "disabled", True),
        lambda: setattr(adapter, "disabled", False),
        lambda: adapter.active.append("own"),
        replace,
        lambda: setattr(adapter, "base", torch.nn.Linear(24, 32, dtype=torch.float64)),
    ]
    for change in changes:
        change()
        steps, expected = model.steps, model.generate(prompt, 50, 0.0, graphs=False)
        assert model.generate(prompt, 50, 0.0, graphs=True).equal(expected)
        assert model.steps is not steps
        steps = model.steps
        assert model.generate(prompt, 50, 0.0, graphs=True).equal(expected)
        assert model.steps is steps
        found.append(expected)
    assert len({tuple(text.flatten().tolist()) for text in found}) >= 5


def test_a_capture_that_fails_warns_once_and_the_model_generates_without_graphs(recorded: Device) -> None:
    model, prompt, recorded.fails = build("Vanilla").double(), torch.randint(11, (2, 5)), True
    expected = model.generate(prompt, 30, 0.0, graphs=False)
    with pytest.warns(UserWarning, match=r"^this Vanilla generates without CUDA graphs, .*operation not permitted"):
        assert model.generate(prompt, 30, 0.0, graphs=True).equal(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.generate(prompt, 30, 0.0).equal(expected)
    assert len(recorded.captures) == 1
    assert recorded.stream == "usual"
    assert recorded.device == "cuda:0"
    with pytest.raises(ValueError, match="graphs must not be True with this Vanilla, whose steps could not be capt"):
        model.generate(prompt, 30, graphs=True)
    # Another model is another matter.
    recorded.fails, model = False, build("Vanilla").double()
    assert model.generate(prompt, 30, 0.0, graphs=True).equal(expected)


@pytest.mark.parametrize("graphs", [False, True])
def test_texts_in_several_threads_are_those_of_one_and_leave_the_mode_of_the_model(
    graphs: bool, recorded: Device
) -> None:
    prompts, model = torch.randint(11, (12, 1, 5)), build("Vanilla", dropout=0.5).double().train()
    model.get_submodule("stack.layers.0").eval()
    modes = [module.training for module in model.modules()]
    expected = [model.generate(prompt, 20 + n, 0.0, graphs=False) for n, prompt in enumerate(prompts)]
    texts: dict[int, Tensor] = {}
    threads = [
        threading.Thread(target=lambda n=n: texts.update({n: model.generate(prompts[n], 20 + n, 0.0, graphs=graphs)}))
        for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(texts[n].equal(expected[n]) for n in range(12))
    assert [module.training for module in model.modules()] == modes
    assert recorded.most == int(graphs)
