"""What counts as kept for the backward pass."""

import torch
from torch import nn
from torch.nn import functional as F

from fairseq_ms.core.config import LayerConfig
from fairseq_ms.core.layers import TransformerStack
from fairseq_ms.tools.saved_bytes import saved_bytes


def test_every_storage_counts_once_and_no_parameter() -> None:
    x = torch.randn(7, 20, requires_grad=True)
    weight = torch.randn(50, 20, requires_grad=True)

    def forward() -> torch.Tensor:
        # Kept: x (for the gradient of the weight), the result of exp, of which two views are saved; the weight.
        y = (x @ weight.t()).exp()
        return (y[:3] * y[3:6]).sum()

    assert saved_bytes(forward, nn.ParameterList([weight])) == 4 * (7 * 20 + 7 * 50)
    assert saved_bytes(forward) == 4 * (7 * 20 + 7 * 50 + 50 * 20)


def test_a_storage_counts_as_a_whole_for_the_smallest_of_its_views() -> None:
    linear = nn.Linear(5, 7, bias=False)
    x, mask = torch.randn(3, 5, requires_grad=True), torch.ones(7, 7)
    assert saved_bytes(lambda: (linear(x).exp() + linear(x[:2]).sum()).sum(), linear) == 4 * (3 * 5 + 3 * 7)
    assert saved_bytes(lambda: F.linear(x, linear.weight) @ mask[:, :1], linear) == 4 * (3 * 5 + 7 * 7)


def test_what_is_freed_before_the_forward_pass_ends_is_not_counted() -> None:
    x = torch.randn(1000, requires_grad=True)

    def forward() -> torch.Tensor:
        x.exp().sin().sum()
        return x.sum()

    assert saved_bytes(forward) == 0


def test_gradients_are_on_while_counting() -> None:
    x = torch.randn(10, requires_grad=True)
    with torch.no_grad():
        assert saved_bytes(lambda: x.exp()) == 4 * 10


def test_the_inputs_of_checkpointed_layers_count_and_nothing_of_their_inside() -> None:
    config = LayerConfig(dim=8, ffn_dim=16, heads=2, checkpoint=True)
    stack = TransformerStack(config, layers=3)
    x = torch.randn(2, 5, 8, requires_grad=True)
    # The last layer's output, its mean and its deviation are what the norm after the layers keeps.
    assert saved_bytes(lambda: stack(x), stack) == 4 * (4 * x.numel() + 2 * 2 * 5)
