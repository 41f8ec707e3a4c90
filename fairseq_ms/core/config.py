"""The configurations of layers and models, which refuse wrong settings in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from torch import Tensor, nn

from fairseq_ms.core.adaptive import Bands
from fairseq_ms.core.cache import LastInputs
from fairseq_ms.core.ops.linear import ACTIVATIONS, NORMS, Norm, ShortConv
from fairseq_ms.core.ops.recompute import check_probability
from fairseq_ms.core.ops.rotary import beginnings, rotation

POSITIONS = ("learned", "rotary", "none")
QK_NORMS = (False, True, "scaled")
RESIDUAL_STARTS: dict[str, Callable[[int], float]] = {
    "normal": lambda depth: 1.0,
    "scaled": lambda depth: (2 * depth) ** -0.5,
    "zero": lambda depth: 0.0,
}
DOWNSAMPLERS = ("avg", "max", "conv")
# Integer fields that may be 0; all others must be at least 1.
_OF_MEMORIES = ("mem_len", "compressed_mem_len", "output_layers")
MAY_BE_ZERO = ("padding_idx", "max_positions", "position_dim", "short_conv", *_OF_MEMORIES)

S = TypeVar("S", bound="LayerConfig")


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Sizes and probabilities of transformer layers.

    Attributes:
        dim: model dimension D
        ffn_dim: width of the feed-forward block
        heads: query heads N
        head_dim: width H of a head, D / N if not given
        kv_heads: key/value heads K, each shared by N / K query heads; N if not given
        dropout, attention_dropout, activation_dropout: probabilities
        activation: a key of ``ops.linear.ACTIVATIONS``; "swiglu" is made narrower (``layers.FeedForward``)
        norm: "layer" or "rms"
        norm_eps: epsilon of norms
        final_norm: whether there is a norm after the last of pre-LN layers
        normalize_before: norms before attention and feed-forward (pre-LN), or after residual connections (post-LN)
        qk_norm: RMS norm of every head's queries and keys, before rotation; "scaled" also multiplies queries by a
            learned temperature for each head, from 1
        sinks: one more key for each head, with a learned score, from 0, and a value of zero
        short_conv: previous positions that are added to each normalised input of attention (``ShortConv``)
        bias: whether the projections of attention and feed-forward have one
        positions: "learned" embeddings are added to tokens, "rotary" rotates queries and keys, "none" leaves order to
            the causal mask and the blocks
        rotary_base: base of rotary frequencies; the slowest pair of channels turns by about 1 / rotary_base a token
        init_residual: factor of the initial projections into the residual stream of L layers, 1 ("normal"),
            1 / sqrt(2 L) ("scaled") or 0 ("zero")
        recompute: keep less for backward (see ``ops/README.md``)
        checkpoint: keep only the input of each layer, and run it again in backward

    Lists become tuples. Raises ValueError for unknown words and for numbers outside their ranges.
    """

    dim: int
    ffn_dim: int
    heads: int
    head_dim: int | None = None
    kv_heads: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "gelu"
    norm: str = "layer"
    norm_eps: float = 1e-5
    final_norm: bool = True
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
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name not in MAY_BE_ZERO)
            if isinstance(value, list | tuple):
                object.__setattr__(self, field.name, _tuples(value))
            # Types are text here, as annotations are not evaluated.
            elif str(field.type).startswith("int") and value is not None and value < least:
                raise ValueError(f"{field.name} must be at least {least}: got {value}")
        words: dict[str, Collection[Any]] = {"activation": ACTIVATIONS, "norm": NORMS, "positions": POSITIONS}
        words |= {"init_residual": RESIDUAL_STARTS, "qk_norm": QK_NORMS, "downsampler": DOWNSAMPLERS}
        # Not every model pools.
        for name, known in words.items():
            if hasattr(self, name) and getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}: got {getattr(self, name)}")
        if self.norm_eps <= 0.0:
            raise ValueError(f"norm_eps must be above 0: got {self.norm_eps}")
        if not (self.final_norm or self.normalize_before):
            raise ValueError("final_norm must be True in post-LN layers, which end in a norm: got False")
        if self.heads % self.key_heads:
            raise ValueError(f"heads must be a multiple of kv_heads {self.kv_heads}: got {self.heads}")
        if self.rotary_base <= 1.0:
            raise ValueError(f"rotary_base must be above 1: got {self.rotary_base}")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            check_probability(name, getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[S], values: dict[str, Any]) -> S:
        """The inverse of ``to_dict``, also from JSON; raises TypeError for unknown fields."""
        types = get_type_hints(cls)
        return cls(**{name: _restored(value, types.get(name)) for name, value in values.items()})

    @property
    def width_of_head(self) -> int:
        """H."""
        return self.head_dim if self.head_dim is not None else self.dim // self.heads

    @property
    def key_heads(self) -> int:
        """K."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def make_norm(self) -> Norm:
        """A norm over D channels."""
        return NORMS[self.norm](self.dim, self.norm_eps)

    def norm_before(self) -> Norm | None:
        """The norm before attention and before feed-forward; None in post-LN layers."""
        return self.make_norm() if self.normalize_before else None

    def short_convolution(self) -> ShortConv | None:
        """The short convolution after ``norm_before``, if there is one."""
        return ShortConv(self.dim, self.short_conv) if self.short_conv else None

    def last_inputs(self, batch_size: int, like: Tensor) -> LastInputs | None:
        """The last inputs of ``short_convolution`` before B texts, if there is one."""
        return LastInputs(like.new_zeros(batch_size, self.short_conv, self.dim)) if self.short_conv else None

    def last_norm(self) -> nn.Module:
        """The norm after the last layer; identity in post-LN, whose layers end in a norm."""
        return self.make_norm() if self.normalize_before and self.final_norm else nn.Identity()

    def post_norm(self) -> nn.Module:
        """The norm after a residual connection; identity in pre-LN."""
        return nn.Identity() if self.normalize_before else self.make_norm()

    def rotation(self, positions: range | Tensor, like: Tensor, head_dim: int | None = None) -> Tensor | None:
        """``ops.rotary.rotation`` of positions (T,) or (B, T); None unless positions are rotary."""
        if self.positions != "rotary":
            return None
        return rotation(positions, head_dim or self.width_of_head, self.rotary_base, like)

    def rotation_after(
        self, start: int | Tensor, count: int, like: Tensor, factor: int = 1, head_dim: int | None = None
    ) -> Tensor | None:
        """``rotation`` of the blocks of k tokens that end among ``count`` tokens from ``start`` on.

        The position of a block is that of its first token.
        """
        rotary = self.positions == "rotary"
        return self.rotation(beginnings(start, count, factor), like, head_dim) if rotary else None


def _tuples(value: Any) -> Any:
    """Lists, also those within lists and tuples, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _restored(value: Any, kind: Any) -> Any:
    """A field's value from JSON: dicts become dataclasses, lists tuples.

    ``kind`` is the field's type, in which the first member of a union stands for its items: a dict finds its dataclass
    among the arguments of a type, too.
    """
    if isinstance(value, dict):
        dataclasses: list[Any] = [part for part in (kind, *get_args(kind)) if is_dataclass(part)]
        return dataclasses[0](**value)
    if isinstance(value, list | tuple) and (inner := [part for part in get_args(kind) if part is not ...]):
        return tuple(_restored(item, inner[0]) for item in value)
    return value


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LayerConfig):
    """Sizes of models over embedded tokens.

    Attributes:
        vocab_size: symbols V
        output_vocab_size: how many are predicted, the first ones; all if not given
        unpredicted: symbols that are read, but never predicted
        padding_idx: the symbol whose embedding starts at zero, and stays there unless it is tied to the output
        max_positions: learned positions, the longest text in tokens; without learned positions there is no limit
        scale_embedding: multiply word embeddings by sqrt(D)
        tie_embeddings: predict by the word embedding
        adaptive_input, adaptive_softmax: narrower embeddings, and a cheaper softmax, for rarer words
        tie_adaptive_weights, tie_adaptive_projections: predict by the adaptive input's words, and by its projections
        project_adaptive_head: project features for the adaptive softmax's head, too, as in Transformer-XL
        init_std: standard deviation that weights start from
        embedding_init_std: that of word and position embeddings, ``init_std`` if not given
    """

    vocab_size: int
    output_vocab_size: int | None = None
    unpredicted: tuple[int, ...] = ()
    padding_idx: int | None = None
    dim: int = 768
    ffn_dim: int = 3072
    heads: int = 12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    max_positions: int = 512
    scale_embedding: bool = False
    tie_embeddings: bool = True
    adaptive_input: Bands | None = None
    adaptive_softmax: Bands | None = None
    tie_adaptive_weights: bool = False
    tie_adaptive_projections: bool = False
    project_adaptive_head: bool = False
    init_std: float = 0.02
    embedding_init_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"heads must divide dim {self.dim}: got {self.heads}")
        predicted = self.output_vocab_size or self.vocab_size
        if predicted > self.vocab_size:
            raise ValueError(f"output_vocab_size must be at most vocab_size {self.vocab_size}: got {predicted}")
        if self.padding_idx is not None and self.padding_idx >= self.vocab_size:
            raise ValueError(f"padding_idx must be a symbol, 0 to {self.vocab_size - 1}: got {self.padding_idx}")
        if wrong := [symbol for symbol in self.unpredicted if not 0 <= symbol < predicted]:
            raise ValueError(f"unpredicted must be symbols, 0 to {predicted - 1}: got {wrong[0]}")
        if self.unpredicted and self.adaptive_softmax is not None:
            raise ValueError("unpredicted must be empty with an adaptive_softmax, which predicts all symbols")
        if self.adaptive_input is not None:
            self.adaptive_input.check("adaptive_input", self.vocab_size, self.dim, self.padding_idx)
        if self.adaptive_softmax is not None:
            self.adaptive_softmax.check("adaptive_softmax", predicted, self.dim)
        if self.tie_embeddings and self.adaptive_softmax is None:
            if self.adaptive_input is not None:
                raise ValueError("tie_embeddings must be False with an adaptive_input and no adaptive_softmax")
            if predicted != self.vocab_size:
                wanted = f"output_vocab_size must be vocab_size {self.vocab_size} with tie_embeddings"
                raise ValueError(f"{wanted}: got {predicted}")
        alike = [(bands.cutoffs, bands.factor) for bands in (self.adaptive_input, self.adaptive_softmax) if bands]
        for name in ("tie_adaptive_weights", "tie_adaptive_projections"):
            if getattr(self, name) and (len(alike) < 2 or alike[0] != alike[1]):
                found = " and ".join(map(str, alike)) or "none"
                rule = f"{name} needs adaptive_input and adaptive_softmax of the same cutoffs and factor"
                raise ValueError(f"{rule}: got {found}")
        if self.project_adaptive_head and self.adaptive_softmax is None:
            raise ValueError("project_adaptive_head needs an adaptive_softmax: got none")

    @property
    def word_std(self) -> float:
        """The standard deviation that embeddings start from."""
        return self.init_std if self.embedding_init_std is None else self.embedding_init_std
