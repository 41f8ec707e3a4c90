"""The parts of all models: token embedding, causal self-attention, feed-forward, and stacks of layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fairseq_ms.core.cache import KeyValueCache
from fairseq_ms.core.config import RESIDUAL_STARTS, LayerConfig, ModelConfig
from fairseq_ms.core.ops.attention import attend, merge_heads, split_kv, split_qkv
from fairseq_ms.core.ops.linear import NORMS, Preceding, activation_linear, norm_heads, norm_linear, projection
from fairseq_ms.core.ops.recompute import Dropout, checkpointed
from fairseq_ms.core.ops.rotary import rotate

M = TypeVar("M", bound=nn.Module)
# The most graphs that torch.compile may make.
GRAPHS = 64


class TypedList(nn.ModuleList, Generic[M]):
    """An ``nn.ModuleList`` of one class of modules, for type checkers."""

    if TYPE_CHECKING:

        def __init__(self, modules: Iterable[M] = ()) -> None: ...

        def __iter__(self) -> Iterator[M]: ...


class TokenEmbedding(nn.Module):
    """Word embedding, plus a position embedding where positions are learned, then dropout.

    Args:
        config: width D, dropout, and whether words are multiplied by sqrt(D)
        words: ``nn.Embedding`` or ``AdaptiveInput``, (B, T) -> (B, T, D)
        positions: number of positions, or None for no position embedding
    """

    def __init__(self, config: ModelConfig, words: nn.Module, positions: int | None) -> None:
        super().__init__()
        self.words = words
        self.dim = config.dim
        self.scale = config.dim**0.5 if config.scale_embedding else 1.0
        self.drop = Dropout(config.dropout, config.recompute)
        self.positions = nn.Embedding(positions, config.dim) if positions is not None else None

    def forward(self, tokens_BT: Tensor, start: int | Tensor = 0) -> Tensor:
        """Embed tokens (B, T) at positions from ``start`` on, a number or, for T = 1, a tensor (1,): (B, T, D).

        Padding must be on the right, where no other token sees it.
        """
        x_BTD = self.words(tokens_BT)
        if self.scale != 1.0:
            x_BTD = x_BTD * self.scale
        if self.positions is not None:
            if not isinstance(start, Tensor):
                start = torch.arange(start, start + tokens_BT.size(1), device=tokens_BT.device)
            x_BTD = x_BTD + self.positions(start)
        return self.drop(x_BTD)

    def like(self, device: torch.device | None = None) -> Tensor:
        """An empty tensor (1, 1, D) like embeddings, on a device or on that of the weights."""
        return next(self.parameters()).new_empty(1, 1, self.dim, device=device)


class Attending(Preceding, Protocol):
    """Attention over sequences of unequal lengths, such as chunks."""

    def attend(self, qkv: Tensor, heads: int, dropout: float, recompute: bool, sinks_N: Tensor | None = None) -> Tensor:
        """Attend by projected queries, keys and values, (..., 3 * N * H) -> (..., N * H)."""


class QueryKey(nn.Module):
    """Query/key norms and temperatures, rotary positions, and the scores of sinks, as far as a model has them.

    Raises ValueError for rotary positions with an odd ``head_dim`` H.
    """

    def __init__(self, config: LayerConfig, head_dim: int, heads: int) -> None:
        super().__init__()
        if config.positions == "rotary" and head_dim % 2:
            raise ValueError(f"rotary positions need heads of an even width: got {head_dim}")
        self.head_dim, self.recompute = head_dim, config.recompute
        self.query = NORMS["rms"](head_dim, config.norm_eps) if config.qk_norm else None
        self.key = NORMS["rms"](head_dim, config.norm_eps) if config.qk_norm else None
        self.temperature = nn.Parameter(torch.ones(heads)) if config.qk_norm == "scaled" else None
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.sinks else None

    def reset_parameters(self) -> None:
        """Set temperatures to 1 and scores of sinks to 0."""
        if self.temperature is not None:
            nn.init.ones_(self.temperature)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(self, x_BTO: Tensor, queries: int, keys: int, rotation_2TF: Tensor | None = None) -> Tensor:
        """Normalise and rotate heads of x (B, T, O): ``queries`` query heads, then ``keys`` key heads, no others."""
        if self.query is not None and self.key is not None:
            norms = [(self.query, queries), (self.key, keys)]
            x_BTO = norm_heads(x_BTO, self.head_dim, norms, self.recompute, self.temperature if queries else None)
        return x_BTO if rotation_2TF is None else rotate(x_BTO, rotation_2TF, queries + keys)


class SelfAttention(nn.Module):
    """Causal multi-head attention: norm, projection to queries, keys and values, attention, output projection."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        self.heads, self.key_heads, self.head_dim = config.heads, config.key_heads, config.width_of_head
        self.dropout = config.attention_dropout
        self.recompute = config.recompute
        self.norm, self.short_conv = config.norm_before(), config.short_convolution()
        inner, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        rows = inner, keys, keys
        self.qkv = projection(config.dim, sum(rows), config.bias, rows)
        self.qk = QueryKey(config, self.head_dim, self.heads)
        self.out = projection(inner, config.dim, config.bias)

    def forward(
        self, x_BTD: Tensor, past: KeyValueCache | Attending | None = None, rotation_2TF: Tensor | None = None
    ) -> Tensor:
        """Attend from every position to itself and all before it, (B, T, D) -> (B, T, D).

        With a KV cache in ``past``, x comes after its positions and is appended to them; otherwise ``past.attend``
        attends. Queries and keys are rotated by ``rotation``, that of the T positions.
        """
        projected, _ = norm_linear(x_BTD, self.norm, self.qkv, self.recompute, self.short_conv, past)
        qkv = self.qk(projected, self.heads, self.key_heads, rotation_2TF)
        dropout = self.dropout if self.training else 0.0
        if past is not None and not isinstance(past, KeyValueCache):
            return self.out(past.attend(qkv, self.heads, dropout, self.recompute, self.qk.sinks))
        (q, k, v), bias = split_qkv(qkv, self.heads, self.key_heads), None
        if past is not None:
            inner = self.heads * self.head_dim
            k, v = past.append(split_kv(qkv[..., inner:], self.key_heads))
            bias = past.bias
        y_BNTH = attend(q, k, v, bias, bias is None, dropout, self.recompute, self.qk.sinks)
        return self.out(merge_heads(y_BNTH))

    def new_cache(self, batch_size: int, capacity: int, like: Tensor) -> KeyValueCache:
        """An empty KV cache for B texts of about ``capacity`` tokens, of the type and on the device of ``like``."""
        cache = KeyValueCache(batch_size, self.key_heads, self.head_dim, capacity, like)
        cache.before = self.config.last_inputs(batch_size, like)
        return cache


class FeedForward(nn.Module):
    """A norm (in pre-LN layers), projection, activation, dropout, projection.

    "swiglu" has a third matrix, so its I is two thirds of ``ffn_dim``, to the nearest multiple of 8: there are about as
    many weights.
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        gated = config.activation == "swiglu"
        width = max(8, 8 * round(config.ffn_dim / 12)) if gated else config.ffn_dim
        rows = (width, width) if gated else (width,)
        self.norm = config.norm_before()
        self.up = projection(config.dim, sum(rows), config.bias, rows)
        self.down = projection(width, config.dim, config.bias)
        self.activation = config.activation
        self.dropout = config.activation_dropout
        self.recompute = config.recompute

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        hidden, _ = norm_linear(x, self.norm, self.up, self.recompute)
        dropout = self.dropout if self.training else 0.0
        return activation_linear(hidden, self.activation, dropout, self.down, self.recompute)


class ResidualLayer(nn.Module):
    """Attention and feed-forward, each with a residual connection.

    In pre-LN, attention and feed-forward begin with a norm; in post-LN, norms follow the residual connections.

    Args:
        config: sizes and probabilities
        attention: a module called as ``attention(x, past, *inputs)``, (B, T, D) -> (B, T, D), with a last projection
            ``out``
        depth: how many layers its residual stream runs through
    """

    attention: Any
    # ``compute``, compiled, for x without a past.
    compiled: Callable[..., Tensor] | None = None

    def __init__(self, config: LayerConfig, attention: nn.Module, depth: int = 1) -> None:
        super().__init__()
        self.attention = attention
        self.ffn = FeedForward(config)
        self.drop = Dropout(config.dropout, config.recompute)
        self.after_attention = config.post_norm()
        self.after_ffn = config.post_norm()
        self.checkpoint = config.checkpoint
        self.residual_start = RESIDUAL_STARTS[config.init_residual](depth)

    def forward(self, x_BTD: Tensor, past: Any = None, *inputs: Any) -> Tensor:
        """x (B, T, D) -> (B, T, D), T may be 0; ``past`` and the other inputs go to the attention."""
        if not x_BTD.size(-2):
            return x_BTD
        compute = self.compute if past is not None or self.compiled is None else partial(self.compiled, self)
        return checkpointed(compute, x_BTD, past, *inputs) if self.checkpoint else compute(x_BTD, past, *inputs)

    def __getstate__(self) -> dict[str, Any]:
        """All but ``compiled``, for copies and pickles."""
        return {name: value for name, value in super().__getstate__().items() if name != "compiled"}

    def compute(self, x_BTD: Tensor, *inputs: Any) -> Tensor:
        """``forward`` of at least one position."""
        x_BTD = self.after_attention(x_BTD + self.drop(self.attention(x_BTD, *inputs)))
        return self.after_ffn(x_BTD + self.drop(self.ffn(x_BTD)))


def compile_layers(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compile the transformer layers of a model by ``torch.compile`` with its arguments, one graph for all of a kind.

    Calls with a state and copies of the model stay eager. Raises ValueError for a model without such layers.
    """
    layers = [module for module in model.modules() if isinstance(module, ResidualLayer)]
    if not layers:
        raise ValueError(f"compile needs a transformer: {type(model).__name__} has none")
    # Kinds of layers, lengths of one block and of several, training and not: each is a graph of its own.
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        kwargs.setdefault("recompile_limit", GRAPHS)
    else:
        # One limit for the whole process, which is only raised; torch 2.6 has the older name.
        limits: Any = torch._dynamo.config
        name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"
        setattr(limits, name, max(GRAPHS, getattr(limits, name)))
    compiled = torch.compile(ResidualLayer.compute, *args, **kwargs)
    for layer in layers:
        layer.compiled = compiled


class TransformerLayer(ResidualLayer):
    """Causal self-attention and feed-forward; ``past`` and rotation as in ``SelfAttention``."""

    attention: SelfAttention

    def __init__(self, config: LayerConfig, depth: int = 1) -> None:
        super().__init__(config, SelfAttention(config), depth)


class TransformerStack(nn.Module):
    """Layers one after the other, then a norm, unless they are post-LN and end in one.

    Args:
        config: sizes and probabilities
        layers: number of layers
        depth: how many layers the residual stream runs through, if more than these
    """

    def __init__(self, config: LayerConfig, layers: int, depth: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.layers = TypedList(TransformerLayer(config, depth or layers) for _ in range(layers))
        self.norm = config.last_norm()

    def forward(
        self,
        x_BTD: Tensor,
        pasts: Sequence[KeyValueCache | Attending] | None = None,
        rotation_2TF: Tensor | None = None,
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D), with one past for each layer and one rotation for all, as in ``SelfAttention``."""
        for index, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, pasts[index] if pasts else None, rotation_2TF)
        return self.norm(x_BTD)

    def new_caches(self, batch_size: int, capacity: int, like: Tensor) -> list[KeyValueCache]:
        """An empty KV cache for each layer, of the type and on the device of ``like``."""
        return [layer.attention.new_cache(batch_size, capacity, like) for layer in self.layers]
