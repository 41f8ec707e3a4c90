"""The sizes of HAED and HRED."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq_ms.core.config import LayerConfig


@dataclass(frozen=True, kw_only=True)
class HAEDConfig(LayerConfig):
    """Sizes of a ``HAED``; ``dim``, ``ffn_dim``, ``heads`` and ``head_dim`` are those of a transformer main.

    Attributes:
        vocab_size: symbols V
        padding_idx: the symbol that is no token of a text; one more than V if not given
        max_positions: the longest text in tokens, where chunks have learned positions; else there is no limit
        segmentation: "words" ends a chunk after a separator and at ``max_segment_len``, "fixed" at that length only
        max_segment_len: the longest chunk in tokens
        separators: symbols that end a word, at least one for "words" and none for "fixed"
        encoder: "mlp" or "lstm"
        main: "transformer" or "lstm"
        decoder: "lstm" or "transformer"
        token_dim: width of token embeddings
        encoder_units: units of the encoder, 256 ("mlp") or 1024 ("lstm") if not given
        position_dim: width of a chunk's position embedding, concatenated with its encoding to ``dim``; if not given,
            100 for a transformer main with learned positions, else 0
        layers: layers of a transformer main
        main_units: units of an LSTM main
        decoder_units: units of an LSTM decoder, width of a transformer decoder
        local_layers, local_heads, local_ffn_dim: sizes of a transformer decoder; 4 * decoder_units if not given
        init_std: standard deviation that weights start from; if not given, 0.02 in transformers, elsewhere as in torch
    """

    vocab_size: int
    padding_idx: int | None = None
    max_positions: int = 512
    segmentation: str = "words"
    max_segment_len: int = 12
    separators: tuple[int, ...] = ()
    encoder: str = "mlp"
    main: str = "transformer"
    decoder: str = "lstm"
    token_dim: int = 10
    encoder_units: int | None = None
    dim: int = 356
    position_dim: int | None = None
    layers: int = 6
    ffn_dim: int = 1424
    heads: int = 8
    head_dim: int | None = 32
    main_units: int = 1500
    decoder_units: int = 1024
    local_layers: int = 2
    local_heads: int = 8
    local_ffn_dim: int | None = None
    init_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads is not None:
            raise ValueError(f"kv_heads must be left out, since heads over chunks share no keys: got {self.kv_heads}")
        for name, other in (("encoder", "mlp"), ("main", "transformer"), ("decoder", "transformer")):
            if getattr(self, name) not in ("lstm", other):
                raise ValueError(f"{name} must be lstm or {other}: got {getattr(self, name)!r}")
        if self.positions != "learned" and (self.main == "lstm" or self.width_of_positions):
            what = "main" if self.main == "lstm" else "position_dim"
            raise ValueError(f"positions must be learned with {what} {getattr(self, what)}: got {self.positions}")
        if self.width_of_encodings < 1:
            raise ValueError(f"dim must exceed position_dim {self.width_of_positions}: got {self.dim}")
        if self.decoder == "transformer" and self.decoder_units % self.local_heads:
            raise ValueError(f"local_heads must divide decoder_units {self.decoder_units}: got {self.local_heads}")
        if self.segmentation not in ("words", "fixed"):
            raise ValueError(f"segmentation must be words or fixed: got {self.segmentation!r}")
        if self.segmentation == "fixed" and self.separators:
            raise ValueError(f"separators have no meaning with fixed segmentation: got {self.separators}")
        if self.segmentation == "words" and not self.separators:
            raise ValueError("separators must name the symbols that end a word: got none")
        if not all(0 <= symbol < self.symbols and symbol != self.pad for symbol in self.separators):
            known = f"symbols from 0 to {self.symbols - 1}, none of them padding"
            raise ValueError(f"separators must be {known}: got {self.separators}")

    @property
    def width_of_positions(self) -> int:
        """Width of the position embedding of chunks."""
        default = 100 if self.main == "transformer" and self.positions == "learned" else 0
        return default if self.position_dim is None else self.position_dim

    @property
    def width_of_encodings(self) -> int:
        """E: the rest of ``dim``."""
        return self.dim - self.width_of_positions

    @property
    def longest_text(self) -> int | None:
        """In tokens; None without a limit."""
        return self.max_positions if self.width_of_positions else None

    @property
    def pad(self) -> int:
        """The padding symbol."""
        return self.vocab_size if self.padding_idx is None else self.padding_idx

    @property
    def symbols(self) -> int:
        """Symbols that are embedded, padding included."""
        return max(self.vocab_size, self.pad + 1)

    def chunks_of(self, length: int) -> int:
        """The most chunks of a text of so many tokens; its first token is one, and a word may be a single token."""
        return 1 + (length if self.segmentation == "words" else -(-length // self.max_segment_len))


@dataclass(frozen=True, kw_only=True)
class HREDConfig(HAEDConfig):
    """Sizes of an ``HRED``: encoder and main model are LSTMs."""

    encoder: str = "lstm"
    main: str = "lstm"
