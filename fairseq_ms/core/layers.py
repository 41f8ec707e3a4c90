"""What every model is made of: embedded tokens, causal self-attention, feed-forward, and stacks of layers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn

from fairseq_ms.core.cache import KeyValueCache, LastInputs
from fairseq_ms.core.checks import check_probability, check_sizes
from fairseq_ms.core.ops.attention import self_attention_linear
from fairseq_ms.core.ops.linear import (
    ACTIVATIONS,
    NORMS,
    FeedForward,
    Norm,
    ShortConv,
    norm_heads,
    norm_linear,
    projection,
)
from fairseq_ms.core.ops.plain import ours
from fairseq_ms.core.ops.recompute import Dropout, checkpointed
from fairseq_ms.core.ops.rotary import beginnings, rotate, rotation

POSITIONS = ("learned", "rotary", "none")
DOWNSAMPLERS = ("avg", "max", "conv")
QK_NORMS = (False, True, "scaled")
RESIDUAL_STARTS: dict[str, Callable[[int], float]] = {
    "normal": lambda depth: 1.0,
    "scaled": lambda depth: (2 * depth) ** -0.5,
    "zero": lambda depth: 0.0,
}

M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound="LayerConfig")


class TypedList(nn.ModuleList, Generic[M]):
    """``nn.ModuleList`` of modules of one class, which type checkers know."""

    if TYPE_CHECKING:

        def __init__(self, modules: Iterable[M] = ()) -> None: ...

        def __iter__(self) -> Iterator[M]: ...


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Sizes and probabilities of transformer layers.

    Attributes:
        dim: model dimension D
        ffn_dim: width of the feed-forward block
        heads: attention heads N
        head_dim: width H of a head, D / N if not given
        dropout, attention_dropout, activation_dropout: probabilities
        activation: a key of ``ops.linear.ACTIVATIONS``; "swiglu" has as many weights (see ``ops.linear.FeedForward``)
        norm: "layer" or "rms"
        normalize_before: norms stand in front of attention and feed-forward (pre-LN), or after the residual
            connections (post-LN)
        qk_norm: an RMS norm of every head's queries and keys, before they are turned; with "scaled", queries are then
            multiplied by a learned temperature a head, from 1
        sinks: every head has a key beside those of positions, with a learned score, from 0, and a value of zero: it may
            attend to nothing
        short_conv: how many positions before it are added to every normalised input of attention (``ShortConv``)
        bias: whether the projections of attention and feed-forward have one
        positions: "learned" ones are added to the tokens, "rotary" ones turn queries and keys, "none" leaves order to
            the causal mask and the blocks
        rotary_base: the slowest pair of channels turns by about 1 / rotary_base a token
        init_residual: what the weights of projections into the residual stream of L layers are multiplied by before
            training: 1 ("normal"), 1 / sqrt(2 L) ("scaled") or 0 ("zero")
        recompute: keep less for backward (see ``ops/README.md``)
        checkpoint: keep only the input of every layer and run it again in backward

    Raises ValueError for an unknown word and for numbers outside their ranges.
    """

    dim: int
    ffn_dim: int
    heads: int
    head_dim: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "gelu"
    norm: str = "layer"
    normalize_before: bool = True
    qk_norm: bool | str = False
    short_conv: int = 0
    sinks: bool = False
    bias: bool = True
    positions: str = "learned"
    rotary_base: float = 10000.0
    init_residual: str = "normal"
    recompute: bool = True
    checkpoint: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)
        words: dict[str, Collection[Any]] = {"activation": ACTIVATIONS, "norm": NORMS, "positions": POSITIONS}
        for name, known in {**words, "init_residual": RESIDUAL_STARTS, "qk_norm": QK_NORMS}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}: got {getattr(self, name)}")
        if self.rotary_base <= 1.0:
            raise ValueError(f"rotary_base must be above 1: got {self.rotary_base}")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            check_probability(name, getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """The values of all fields, as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[S], values: dict[str, Any]) -> S:
        """The inverse of ``to_dict``, from JSON too; raises TypeError for a name that the class does not have."""
        types = get_type_hints(cls)
        return cls(**{name: _restored(value, types.get(name)) for name, value in values.items()})

    @property
    def width_of_head(self) -> int:
        """H."""
        return self.head_dim if self.head_dim is not None else self.dim // self.heads

    def feed_forward(self) -> FeedForward:
        """The feed-forward block of one layer."""
        rest = self.activation_dropout, self.norm if self.normalize_before else None, self.recompute, self.bias
        return FeedForward(self.dim, self.ffn_dim, self.activation, *rest)

    def make_norm(self) -> Norm:
        """A norm over D."""
        return NORMS[self.norm](self.dim)

    def norm_before(self) -> Norm | None:
        """The norm in front of a layer's attention: none in post-LN layers."""
        return self.make_norm() if self.normalize_before else None

    def short_convolution(self) -> ShortConv | None:
        """The short convolution after ``norm_before``, or None."""
        return ShortConv(self.dim, self.short_conv) if self.short_conv else None

    def last_inputs(self, batch_size: int, like: Tensor) -> LastInputs | None:
        """The empty memory of that convolution for B texts, or None."""
        taps = self.short_conv
        return LastInputs(like.new_zeros(batch_size, taps, self.dim)) if taps else None

    def last_norm(self) -> nn.Module:
        """The norm after the last layer of a pre-LN stack; identity in post-LN, whose layers end in one."""
        return self.make_norm() if self.normalize_before else nn.Identity()

    def post_norm(self) -> nn.Module:
        """The norm after a residual connection of a post-LN layer; identity in pre-LN."""
        return nn.Identity() if self.normalize_before else self.make_norm()

    def rotation(self, positions: range | Tensor, like: Tensor, head_dim: int | None = None) -> Tensor | None:
        """The ``ops.rotary.rotation`` of T positions, (2, T, H / 2), or of (B, T); None unless they are rotary."""
        if self.positions != "rotary":
            return None
        return rotation(positions, head_dim or self.width_of_head, self.rotary_base, like)

    def rotation_after(
        self, start: int | Tensor, count: int, like: Tensor, factor: int = 1, head_dim: int | None = None
    ) -> Tensor | None:
        """The ``rotation`` of the blocks of k tokens that are complete after ``start + count`` tokens, and not before.

        A block is turned by the position of its first token.
        """
        rotary = self.positions == "rotary"
        return self.rotation(beginnings(start, count, factor), like, head_dim) if rotary else None


def _restored(value: Any, kind: Any) -> Any:
    """A field's value from what JSON has of it, where its type names a dataclass or tuples of one."""
    if isinstance(value, dict):
        dataclasses: list[Any] = [part for part in (kind, *get_args(kind)) if is_dataclass(part)]
        return dataclasses[0](**value)
    if isinstance(value, list | tuple) and (inner := [part for part in get_args(kind) if part is not ...]):
        return tuple(_restored(item, inner[0]) for item in value)
    return value


class TokenEmbedding(nn.Module):
    """Word embedding, plus that of the position where positions are learned, then dropout.

    Args:
        words: maps (B, T) to (B, T, D): ``nn.Embedding`` or ``AdaptiveInput``
        positions: how many positions there are, or None for no position embedding
        dim: model dimension D
        dropout: probability
        recompute: keep the dropout mask as a seed
        scale: what words are multiplied by
    """

    def __init__(
        self,
        words: nn.Module,
        positions: int | None,
        dim: int,
        dropout: float = 0.0,
        recompute: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.words = words
        self.dim = dim
        self.scale = scale
        self.drop = Dropout(dropout, recompute)
        self.positions = nn.Embedding(positions, dim) if positions is not None else None

    def forward(self, tokens_BT: Tensor, start: int | Tensor = 0) -> Tensor:
        """Embeddings (B, T, D) of tokens at positions start .. start + T - 1; of one, start may be a tensor (1,).

        Padding must be on the right, so that no token that counts has it in its past.
        """
        x_BTD = self.words(tokens_BT)
        if self.scale != 1.0:
            x_BTD = x_BTD * self.scale
        if self.positions is not None:
            if not isinstance(start, Tensor):
                start = torch.arange(start, start + tokens_BT.size(1), device=tokens_BT.device)
            x_BTD = x_BTD + self.positions(start)
        return self.drop(x_BTD)

    def like(self) -> Tensor:
        """An empty (1, 1, D), of the type and on the device of what ``forward`` gives."""
        return next(self.parameters()).new_empty(1, 1, self.dim)


@ours
class Downsample(nn.Module):
    """Pools every k consecutive positions into one (Multi-scale Transformer LMs, Section 3.2, Table 4).

    Args:
        kind: "avg" mean, "max" maximum, "conv" convolution with kernel and stride k; raises ValueError for another one
        dim: model dimension D
        factor: k
    """

    def __init__(self, kind: str, dim: int, factor: int) -> None:
        super().__init__()
        if kind not in DOWNSAMPLERS:
            raise ValueError(f"downsampler must be avg, max or conv: got {kind!r}")
        self.kind = kind
        self.factor = factor
        # Kernel and stride being equal, the convolution is one projection of k positions side by side.
        self.conv = projection(factor * dim, dim) if kind == "conv" and factor > 1 else None

    @property
    def padding(self) -> float:
        """What a position before the first token holds: nothing for a sum, never the greatest for a maximum."""
        return -math.inf if self.kind == "max" else 0.0

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, C * k, D) -> (B, C, D)."""
        if self.factor == 1:
            return x_BTD
        blocks = x_BTD.unflatten(1, (x_BTD.size(1) // self.factor, self.factor))  # (B, C, k, D)
        if self.conv is not None:
            return self.conv(blocks.flatten(2))
        return blocks.mean(2) if self.kind == "avg" else blocks.amax(2)


class Attending(Protocol):
    """Attention over anything but whole texts of one length: a cache, or chunks.

    Attributes:
        before: what the layer's short convolution remembers, if it has one
    """

    before: Any

    def attend(self, qkv: Tensor, heads: int, dropout: float, recompute: bool, sinks_N: Tensor | None = None) -> Tensor:
        """Projected queries, keys and values (..., 3 * N * H) -> what the heads read (..., N * H)."""


class QueryKey(nn.Module):
    """What happens to projected queries and keys before they meet: an RMS norm of every head, and their rotation.

    It also holds the scores of the heads' ``sinks``, if they have any.

    Args:
        config: which of these there are
        head_dim: H
        heads: of queries

    Raises ValueError for rotary positions with heads of an odd width.
    """

    def __init__(self, config: LayerConfig, head_dim: int, heads: int) -> None:
        super().__init__()
        if config.positions == "rotary" and head_dim % 2:
            raise ValueError(f"rotary positions need heads of an even width: got {head_dim}")
        self.head_dim, self.recompute = head_dim, config.recompute
        self.query = NORMS["rms"](head_dim) if config.qk_norm else None
        self.key = NORMS["rms"](head_dim) if config.qk_norm else None
        self.temperature = nn.Parameter(torch.ones(heads)) if config.qk_norm == "scaled" else None

        self.sinks = nn.Parameter(torch.zeros(heads)) if config.sinks else None

    def reset_parameters(self) -> None:
        """Scale nothing, and sinks are as any key that says nothing; the norms start as all do."""
        if self.temperature is not None:
            nn.init.ones_(self.temperature)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(self, x_BTO: Tensor, queries: int, keys: int, rotation_2TF: Tensor | None = None) -> Tensor:
        """Normalise and rotate the first ``queries`` heads of x (B, T, O) and the next ``keys``; leave the rest."""
        if self.query is not None and self.key is not None:
            norms = [(self.query, queries), (self.key, keys)]
            x_BTO = norm_heads(x_BTO, self.head_dim, norms, self.recompute, self.temperature if queries else None)
        return x_BTO if rotation_2TF is None else rotate(x_BTO, rotation_2TF, queries + keys)


class SelfAttention(nn.Module):
    """Causal: norm, one projection to queries, keys and values, attention to the past, projection back.

    Args:
        config: sizes and probabilities; N heads of H each, where N * H need not be D
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        self.heads, self.head_dim = config.heads, config.width_of_head
        self.dropout = config.attention_dropout
        self.recompute = config.recompute
        self.norm, self.short_conv = config.norm_before(), config.short_convolution()
        inner = self.heads * self.head_dim
        self.qkv = projection(config.dim, 3 * inner, config.bias, rows=3 * (inner,))
        self.qk = QueryKey(config, self.head_dim, self.heads)
        self.out = projection(inner, config.dim, config.bias)

    def forward(self, x_BTD: Tensor, past: Attending | None = None, rotation_2TF: Tensor | None = None) -> Tensor:
        """Attend from every position to itself and all before it, (B, T, D) -> (B, T, D).

        With ``past``, its ``attend`` decides what lies before a position, and takes in keys and values of x. With the
        ``rotation`` of its T positions, queries and keys are turned by them.
        """
        before = past.before if past is not None else None
        projected, _ = norm_linear(x_BTD, self.norm, self.qkv, self.recompute, self.short_conv, before)
        qkv = self.qk(projected, self.heads, self.heads, rotation_2TF)
        dropout = self.dropout if self.training else 0.0
        if past is None:
            return self_attention_linear(qkv, self.heads, self.out, dropout, self.recompute, self.qk.sinks)
        return self.out(past.attend(qkv, self.heads, dropout, self.recompute, self.qk.sinks))

    def new_cache(self, batch_size: int, capacity: int, like: Tensor) -> KeyValueCache:
        """An empty cache for B texts of about ``capacity`` tokens, of the type and on the device of ``like``."""
        cache = KeyValueCache(batch_size, self.heads, self.head_dim, capacity, like)
        cache.before = self.config.last_inputs(batch_size, like)
        return cache


class ResidualLayer(nn.Module):
    """Attention and feed-forward, each beside a residual connection.

    A pre-LN layer normalises in front of attention and feed-forward, which own those norms; a post-LN layer after the
    residual connections.

    Args:
        config: what it has in common with other layers
        attention: from (B, T, D) and whatever else it reads to (B, T, D), by a projection ``out`` at its end
        depth: how many layers its residual stream runs through
    """

    attention: Any
    # The index of the cache among the other inputs. The layer runs uncompiled when there is one, or no ``compiled``.
    past = 0
    compiled: Callable[..., Tensor] | None = None

    def __init__(self, config: LayerConfig, attention: nn.Module, depth: int = 1) -> None:
        super().__init__()
        self.attention = attention
        self.ffn = config.feed_forward()
        self.drop = Dropout(config.dropout, config.recompute)
        self.after_attention = config.post_norm()
        self.after_ffn = config.post_norm()
        self.checkpoint = config.checkpoint
        self.residual_start = RESIDUAL_STARTS[config.init_residual](depth)

    def forward(self, x_BTD: Tensor, *inputs: Any) -> Tensor:
        """x (B, T, D) -> (B, T, D), also of no positions; the other inputs are the attention's."""
        if not x_BTD.size(-2):
            return x_BTD
        remembers = any(past is not None for past in inputs[self.past : self.past + 1])
        compute = self.compute if remembers or self.compiled is None else partial(self.compiled, self)
        return checkpointed(compute, x_BTD, *inputs) if self.checkpoint else compute(x_BTD, *inputs)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: all but ``compiled``."""
        return {name: value for name, value in super().__getstate__().items() if name != "compiled"}

    def compute(self, x_BTD: Tensor, *inputs: Any) -> Tensor:
        """What ``forward`` does with at least one position."""
        x_BTD = self.after_attention(x_BTD + self.drop(self.attention(x_BTD, *inputs)))
        return self.after_ffn(x_BTD + self.drop(self.ffn(x_BTD)))


def compile_layers(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compile the transformer layers of a model, one graph for all of a kind, by ``torch.compile`` with what it takes.

    With a state nothing is compiled, and neither is a copy of the model. Raises ValueError for a model without them.
    """
    layers = [module for module in model.modules() if isinstance(module, ResidualLayer)]
    if not layers:
        raise ValueError(f"compile needs a transformer: {type(model).__name__} has none")
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        # Kinds of layers, lengths of one block and of several, training and not: each is a graph of its own.
        kwargs.setdefault("recompile_limit", 64)
    compiled = torch.compile(ResidualLayer.compute, *args, **kwargs)
    for layer in layers:
        layer.compiled = compiled


class TransformerLayer(ResidualLayer):
    """Causal self-attention and feed-forward; ``past`` and rotation as in ``SelfAttention``."""

    attention: SelfAttention

    def __init__(self, config: LayerConfig, depth: int = 1) -> None:
        super().__init__(config, SelfAttention(config), depth)


class TransformerStack(nn.Module):
    """Layers one after the other, and a norm after the last, unless post-LN layers end in one.

    Args:
        config: what the layers have in common
        layers: how many
        depth: how many layers the residual stream runs through, if there are others before
    """

    def __init__(self, config: LayerConfig, layers: int, depth: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.layers = TypedList(TransformerLayer(config, depth or layers) for _ in range(layers))
        self.norm = config.last_norm()

    def forward(
        self, x_BTD: Tensor, pasts: Sequence[Attending] | None = None, rotation_2TF: Tensor | None = None
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D); one ``past`` a layer and one rotation for all, as in ``SelfAttention``."""
        for index, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, pasts[index] if pasts else None, rotation_2TF)
        return self.norm(x_BTD)

    def new_caches(self, batch_size: int, capacity: int, like: Tensor) -> list[KeyValueCache]:
        """An empty cache of every layer, of the type and on the device of ``like``."""
        return [layer.attention.new_cache(batch_size, capacity, like) for layer in self.layers]
