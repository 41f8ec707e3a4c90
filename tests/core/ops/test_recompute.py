"""What is computed again in backward gives what autograd gives when it keeps everything."""

import gc
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fairseq_ms.core.config import LayerConfig
from fairseq_ms.core.layers import FeedForward, TransformerLayer
from fairseq_ms.core.ops.recompute import checkpointed, draw_mask, draw_seed
from fairseq_ms.core.transformer_ql import draw_uniform
from fairseq_ms.tools.saved_bytes import saved_bytes
from tests.helpers.gradients import gradients
from tests.helpers.torch_versions import not_oldest


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_a_layer_under_autocast_has_bfloat16_gradients_near_those_of_float32(p: float) -> None:
    x = torch.randn(2, 70, 24, requires_grad=True)
    # On a GPU, each precision has a kernel of attention with masks of its own.
    in_attention = p if x.device.type == "cpu" else 0.0
    layer = TransformerLayer(
        LayerConfig(dim=24, ffn_dim=48, heads=3, dropout=p, attention_dropout=in_attention, activation_dropout=p)
    )
    inputs = [x, *layer.parameters()]
    torch.manual_seed(5)
    exact = layer(x)
    torch.manual_seed(5)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        rough = layer(x)
    grads = gradients(rough, inputs)
    assert all(grad.dtype == torch.float32 for grad in grads)
    for a, b in zip([rough, *grads], [exact, *gradients(exact, inputs)], strict=True):
        # bfloat16 has 8 bits: a few roundings of 0.4% each, relative to the largest element.
        assert (a - b).abs().max() <= 0.05 * b.abs().max()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mask_keeps_the_wanted_share_and_the_mean(p: float, dtype: torch.dtype) -> None:
    count = 400_003
    mask = draw_mask(p, torch.empty(count, dtype=dtype), 11)
    assert mask.dtype == dtype
    kept = mask != 0.0
    torch.testing.assert_close(mask[kept].unique(), torch.tensor([1.0 / (1.0 - p)], dtype=dtype))
    # Five standard deviations of the mean of independent draws.
    assert kept.double().mean().item() == pytest.approx(1.0 - p, abs=5.0 * math.sqrt(p * (1.0 - p) / count))


def test_neighbours_in_a_mask_are_independent() -> None:
    mask = (draw_mask(0.5, torch.empty(400_000), 11) != 0.0).double() - 0.5
    for distance in (1, 2, 3, 4, 5, 8, 64):
        # The mean of 400,000 independent +-1/4 has a standard deviation of 0.0004.
        assert abs((mask[distance:] * mask[:-distance]).mean().item()) < 0.002


@pytest.mark.parametrize("p", [1e-9, 1.0 - 1e-9])
def test_extreme_probabilities_do_not_overflow(p: float) -> None:
    mask = draw_mask(p, torch.empty(1000), 1)
    assert mask.isfinite().all()
    assert (mask != 0.0).double().mean().item() == pytest.approx(1.0 - p, abs=0.01)


def test_seeds_are_drawn_on_the_cpu_whatever_the_default_device() -> None:
    drawn = []
    for device in ("cpu", "meta"):
        torch.manual_seed(1)
        # A tensor of the meta device has no number to give away; one of a GPU would have to be waited for.
        with torch.device(device):
            drawn.append((draw_seed(), draw_uniform()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("recompute", [True, False])
def test_gradients_of_a_layer_with_dropout_are_its_slope(recompute: bool) -> None:
    layer = TransformerLayer(
        LayerConfig(
            dim=12,
            ffn_dim=20,
            heads=3,
            dropout=0.2,
            attention_dropout=0.3,
            activation_dropout=0.25,
            recompute=recompute,
        )
    ).double()
    x = torch.randn(2, 70, 12, dtype=torch.float64)
    direction = [torch.randn_like(parameter) for parameter in layer.parameters()]

    def loss(step: float) -> torch.Tensor:
        torch.manual_seed(9)
        moved = {name: value + step * towards for (name, value), towards in zip(layer.named_parameters(), direction)}
        return torch.func.functional_call(layer, moved, (x,)).sin().sum()

    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(loss(0.0), list(layer.parameters())), direction))
    difference = (loss(1e-5) - loss(-1e-5)) / 2e-5
    # Central differences err by 1e-10 times the third derivative, a few hundred here.
    torch.testing.assert_close(slope, difference.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.cpu
def test_recomputing_keeps_about_half_of_what_autograd_keeps() -> None:
    def kept(recompute: bool) -> int:
        layer = TransformerLayer(LayerConfig(dim=48, ffn_dim=192, heads=4, recompute=recompute))
        x = torch.randn(2, 64, 48, requires_grad=True)
        return saved_bytes(lambda: layer(x), layer)

    unit = 2 * 64 * 48 * 4
    # x, queries, keys, values, what they give, x after attention, and four times its width in the middle: 1 + 3 + 1 +
    # 1 + 4; of every query and head, the logarithm of a sum; means
    # and deviations of two norms.
    assert kept(True) == 10 * unit + 2 * 64 * 4 * 4 + 4 * 2 * 64 * 4
    assert kept(False) > 16 * unit


class Storages(TorchDispatchMode):
    """Notes every storage that operations make, beside those of some tensors, and tells how much of it is alive."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in known}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self.made[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        return result

    def alive(self) -> int:
        new = (self.made[place] for place in self.made.keys() - self.known)
        return sum(count for reference, count in new if not reference.expired())


WHICH: dict[str, dict[str, Any]] = {
    "layer": {},
    "rms, convolution": {"norm": "rms", "short_conv": 3, "activation": "swiglu", "qk_norm": "scaled"},
    "relu": {"activation": "relu"},
    "squared": {"activation": "relu_squared"},
    "dropout": {"dropout": 0.2, "activation_dropout": 0.3},
}
SIZES: dict[str, Any] = {"dim": 12, "ffn_dim": 36, "heads": 3}


def feed_forward(recompute: bool, **changes: Any) -> Any:
    return FeedForward(LayerConfig(**SIZES, recompute=recompute, **changes))


class LowRank(nn.Module):
    """An adapter, whose product reads what the projection reads."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.cpu
@not_oldest
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("which", WHICH)
def test_of_a_feed_forward_two_tensors_stay_alive(which: str, adapted: bool) -> None:
    x = torch.randn(2, 64, 12, requires_grad=True)
    alive = {}
    for recompute in (True, False):
        block = feed_forward(recompute, **WHICH[which])
        if adapted:
            block.up, block.down = LowRank(block.up), LowRank(block.down)
        with Storages(x, *block.parameters()) as storages:
            y = block(x)
        gc.collect()
        alive[recompute] = storages.alive() - y.nbytes
        assert 0 <= alive[recompute] + x.nbytes - saved_bytes(partial(block, x), block) <= 8
    per_position = 4 * 2 * 64
    inner = block.down.base.in_features if adapted else block.down.in_features
    hidden = inner * (2 if WHICH[which].get("activation") == "swiglu" else 1)
    # What is before the activation, the numbers by which the norm shifts and scales, what is inside an adapter.
    assert alive[True] <= per_position * (hidden + 3 + (4 if adapted else 0))
    assert alive[False] >= per_position * (hidden + 12)


def ways_to_run(block: nn.Module, x: Tensor, way: str) -> tuple[Tensor, list[Tensor]]:
    """The result and all gradients."""
    torch.manual_seed(3)
    run: Any = block
    if way == "checkpoint":
        run = partial(checkpoint, block, use_reentrant=False)
    elif way == "reentrant":
        run = partial(checkpoint, block, use_reentrant=True)
    inputs = [tensor for tensor in (x, *block.parameters()) if tensor.requires_grad]
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        y = run(x)
    loss = (y.float() * torch.linspace(-1.0, 1.0, y.numel()).view_as(y)).sum()
    for tensor in inputs:
        tensor.grad = None
    if way == "twice":
        loss.backward(retain_graph=True)
    if way == "thread":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
    else:
        loss.backward(create_graph=way == "graph")
    return y, [tensor.grad for tensor in inputs if tensor.grad is not None]


@pytest.mark.cpu
@pytest.mark.parametrize(
    "way", ["once", "twice", "thread", "graph", "autocast", "checkpoint", "reentrant", "frozen", "no gradient of x"]
)
@pytest.mark.parametrize("which", [which for which in WHICH if which != "dropout"])
def test_what_is_made_again_has_the_bits_of_what_is_kept(which: str, way: str) -> None:
    x, found = torch.randn(2, 9, 12, requires_grad=way != "no gradient of x"), []
    weights = feed_forward(True, **WHICH[which]).state_dict()
    for recompute in (True, False):
        block = feed_forward(recompute, **WHICH[which])
        block.load_state_dict(weights)
        block.up.weight.requires_grad_(way != "frozen")
        block.norm.requires_grad_(way != "frozen")
        found.append(ways_to_run(block, x, way))
    (one, one_grads), (other, other_grads) = found
    assert one.equal(other)
    assert len(one_grads) == len(other_grads) > 1
    for a, b in zip(one_grads, other_grads):
        assert a.equal(b)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("which", ["layer", "rms, convolution", "dropout"])
def test_what_is_changed_in_place_before_backward_is_refused_as_torch_does(which: str, inside: bool) -> None:
    for recompute in (True, False):
        block, x = feed_forward(recompute, **WHICH[which]), torch.randn(2, 5, 12, requires_grad=True)
        loss = block(x).sum()
        with torch.no_grad():
            (block.norm.weight if inside else x).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@not_oldest
def test_a_recipe_inside_a_checkpoint_keeps_nothing_alive() -> None:
    block, x = feed_forward(True), torch.randn(2, 64, 12, requires_grad=True)
    with Storages(x, *block.parameters()) as storages:
        y = checkpointed(block, x)
    gc.collect()
    assert storages.alive() == y.nbytes


def test_weights_that_stand_in_for_a_models_own_are_those_of_its_gradients() -> None:
    block = feed_forward(True).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    others = {name: torch.randn_like(weight).requires_grad_() for name, weight in block.named_parameters()}
    found = []
    for block.recompute in (True, False):
        y = torch.func.functional_call(block, others, (x,))
        found.append([y, *gradients(y, [x, *others.values()])])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", WHICH)
def test_second_derivatives_are_the_slopes_of_the_first(which: str) -> None:
    block = feed_forward(True, **WHICH[which]).double()
    for weight in block.parameters():
        nn.init.uniform_(weight, -0.5, 0.5)
    names, weights = zip(*block.named_parameters())

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        torch.manual_seed(4)
        return torch.func.functional_call(block, dict(zip(names, weights)), (x,))

    inputs = [torch.randn(1, 3, 12, dtype=torch.float64, requires_grad=True), *weights]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_transforms_of_torch_go_through_a_layer() -> None:
    block, x = feed_forward(True).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    found = torch.func.grad(lambda x: block(x).sin().sum())(x)
    x.requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(block(x).sin().sum(), x)[0])
