"""What the models are made of, for one position at a time: a state is a vector (D,) in double precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

Vector = torch.Tensor
Weights = Mapping[str, torch.Tensor]


def weights_of(module: torch.nn.Module) -> Weights:
    """The parameters of a model by name, ``decoder.`` standing for the model of the core in a decoder."""
    state = module.state_dict(keep_vars=True)
    return {name.replace("decoder.core.", "decoder."): value.double() for name, value in state.items()}


def zeros(count: int) -> Vector:
    """As many zeros."""
    return torch.zeros(count, dtype=torch.float64)


def within(weights: Weights, name: str) -> Weights:
    """The parameters of one part of a model."""
    found = {key[len(name) + 1 :]: value for key, value in weights.items() if key.startswith(name + ".")}
    assert found, f"no parameters called {name}: {sorted(weights)}"
    return found


def linear(weights: Weights, state: Vector) -> Vector:
    """W x + b, or W x."""
    product = weights["weight"] @ state
    return product + weights["bias"] if "bias" in weights else product


def norm(weights: Weights, state: Vector) -> Vector:
    """Mean 0 and variance 1 over the entries, then a gain and a shift; without a shift, mean square 1 and a gain."""
    if "bias" not in weights:
        return state / ((state**2).sum() / len(state) + 1e-5).sqrt() * weights["weight"]
    centred = state - state.sum() / len(state)
    variance = (centred**2).sum() / len(state)
    return centred / (variance + 1e-5).sqrt() * weights["weight"] + weights["bias"]


def sigmoid(numbers: Vector) -> Vector:
    """1 / (1 + exp(-x)) for each number."""
    return 1.0 / (1.0 + torch.exp(-numbers))


def activation(name: str, state: Vector) -> Vector:
    """GELU (exact), ReLU, its square or swish of each number; for swiglu, swish of one half times the other."""
    if name == "swiglu":
        half = len(state) // 2
        return activation("swish", state[:half]) * state[half:]
    functions = {
        "gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        "relu": lambda x: torch.where(x > 0.0, x, 0.0),
        "relu_squared": lambda x: torch.where(x > 0.0, x, 0.0) ** 2,
        "swish": lambda x: x * sigmoid(x),
    }
    return functions[name](state)


def softmax(scores: Sequence[Vector]) -> list[Vector]:
    """exp(score) over the sum of them."""
    exponentials = (torch.stack(list(scores)) - max(scores).detach()).exp()
    return list(exponentials / exponentials.sum())


def attend(query: Vector, keys: Sequence[Vector], values: Sequence[Vector], sinks: Sequence[Vector] = ()) -> Vector:
    """One head's answer to one query: the mean of values, weighted by softmax(q k / sqrt(H)); zero with no key.

    A sink is a score more, whose value is zero.
    """
    if not keys:
        return zeros(len(query))
    shares = softmax([query @ key / math.sqrt(len(query)) for key in keys] + [*sinks])
    return sum((share * value for share, value in zip(shares, values)), zeros(len(values[0])))


def head(state: Vector, index: int, heads: int) -> Vector:
    """The entries of a projection that belong to one head."""
    width = len(state) // heads
    return state[index * width : (index + 1) * width]


def pool(kind: str, weights: Weights, states: Sequence[Vector | None]) -> Vector:
    """One block from its k states; ``None`` is padding, which counts as zeros but never wins a maximum."""
    there = [state for state in states if state is not None]
    nothing = zeros(len(there[0]))
    if kind == "avg":
        return sum(there, nothing) / len(states)
    if kind == "max":
        return torch.stack(there).amax(0)
    # A convolution of kernel and stride k: one matrix for each of the k places, side by side.
    return linear(weights, torch.cat([nothing if state is None else state for state in states]))


def feed_forward(weights: Weights, state: Vector, function: str) -> Vector:
    """W2 f(W1 x)."""
    return linear(within(weights, "down"), activation(function, linear(within(weights, "up"), state)))


def rows(weights: Weights, start: int, stop: int) -> Weights:
    """The part of a linear layer that computes the outputs ``start`` to ``stop - 1``."""
    return {name: value[start:stop] for name, value in weights.items()}


def predict(weights: Weights, state: Vector) -> Vector:
    """Logits (V,): a matrix from the width of the model to the vocabulary, which may be that of the embedding."""
    return weights.get("decoder.project.weight", weights["decoder.embed.words.weight"]) @ state
