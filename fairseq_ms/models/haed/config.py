"""Flags of ``haed`` and ``hred``, and the rules they obey."""

# fairseq reads the types of a configuration's fields, so its annotations must not become strings.

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.tasks import FairseqTask
from omegaconf import II

from fairseq_ms.lm.choices import Activation, Recompute
from fairseq_ms.lm.config import require, validate_positions

SPACE = "▁"
"""The symbol for a space in character data, as in sentencepiece."""

IEM_CRITERION = "in_batch_sampled_softmax"
"""The criterion of the first phase."""

# What a flag means when it is not given: its default depends on the kind of part that it belongs to.
MAIN_DEFAULTS: dict[str, dict[str, int]] = {
    "transformer": {
        "decoder_layers": 6,
        "decoder_ffn_embed_dim": 1424,
        "decoder_attention_heads": 8,
        "attention_head_dim": 32,
        "position_embed_dim": 100,
    },
    "lstm": {"main_units": 1500, "position_embed_dim": 0},
}
CHUNK_DECODER_DEFAULTS: dict[str, dict[str, int]] = {
    "transformer": {"local_layers": 2, "local_attention_heads": 8},
    "lstm": {},
}


def _optional(help: str) -> Any:
    return field(default=None, metadata={"help": help})


@dataclass
class HAEDConfig(FairseqDataclass):
    """Flags of the hierarchical encoder-decoder; the spelling is fairseq's where fairseq has one."""

    segmentation: ChoiceEnum(["words", "fixed"]) = field(  # type: ignore[valid-type]
        default="words",
        metadata={"help": "where a chunk ends: behind a separator or at --max-segment-len, or only at that length"},
    )
    max_segment_len: int = field(default=12, metadata={"help": "greatest number of tokens in a chunk"})
    separators: Optional[str] = _optional(
        "symbols that end a word, separated by spaces, with --segmentation words "
        f"(default: {SPACE}, if the dictionary has it, and the end of a line)"
    )
    encoder: ChoiceEnum(["mlp", "lstm"]) = field(  # type: ignore[valid-type]
        default="mlp", metadata={"help": "how a chunk is encoded"}
    )
    main: ChoiceEnum(["transformer", "lstm"]) = field(  # type: ignore[valid-type]
        default="transformer", metadata={"help": "the model over chunks"}
    )
    decoder: ChoiceEnum(["lstm", "transformer"]) = field(  # type: ignore[valid-type]
        default="lstm", metadata={"help": "the model over the tokens of one chunk"}
    )
    token_embed_dim: int = field(default=10, metadata={"help": "width of the token embeddings"})
    encoder_units: Optional[int] = _optional("units of the encoder (default: 256 for mlp, 1024 for lstm)")
    decoder_embed_dim: int = field(
        default=356, metadata={"help": "width of the main model: chunk encoding plus position embedding"}
    )
    position_embed_dim: Optional[int] = _optional(
        "width of the position embedding beside the encoding (default: 100 for a transformer main, 0 for lstm)"
    )
    decoder_layers: Optional[int] = _optional("layers of a transformer main (default: 6)")
    decoder_ffn_embed_dim: Optional[int] = _optional("feed-forward width of a transformer main (default: 1424)")
    decoder_attention_heads: Optional[int] = _optional("attention heads of a transformer main (default: 8)")
    attention_head_dim: Optional[int] = _optional("width of such a head (default: 32)")
    main_units: Optional[int] = _optional("units of an lstm main (default: 1500)")
    decoder_units: int = field(default=1024, metadata={"help": "units of the decoder: hidden units, or its width"})
    local_layers: Optional[int] = _optional("layers of a transformer decoder (default: 2)")
    local_attention_heads: Optional[int] = _optional("attention heads of a transformer decoder (default: 8)")
    local_ffn_embed_dim: Optional[int] = _optional(
        "feed-forward width of a transformer decoder (default: 4 x --decoder-units)"
    )
    query: ChoiceEnum(["none", "linear"]) = field(  # type: ignore[valid-type]
        default="none",
        metadata={
            "help": "first phase only: multiply the main model's output with chunk encodings as it is, as far as these "
            "are wide (none), or behind a learned projection that the second phase drops (linear)"
        },
    )
    activation_fn: Activation = field(
        default="gelu", metadata={"help": "activation function of the feed-forward blocks"}
    )
    dropout: float = field(default=0.0, metadata={"help": "dropout probability"})
    attention_dropout: float = field(default=0.0, metadata={"help": "dropout probability for attention weights"})
    activation_dropout: float = field(default=0.0, metadata={"help": "dropout probability after activation in FFN"})
    init_std: Optional[float] = _optional(
        "standard deviation of the normal distribution all weights start from (default: 0.02 in transformers, "
        "elsewhere torch's own start)"
    )
    checkpoint_activations: bool = field(
        default=False,
        metadata={"help": "keep only the input of every transformer layer, and run the layer again in backward"},
    )
    recompute: Recompute = field(
        default="pointwise",
        metadata={"help": "what transformer layers compute again in backward instead of keeping it"},
    )
    add_bos_token: bool = II("task.add_bos_token")
    tokens_per_sample: Optional[int] = II("task.tokens_per_sample")
    max_target_positions: Optional[int] = II("task.max_target_positions")
    # Decides the phase: the implicit embedding matrix is trained without a decoder. `fairseq-validate` puts the whole
    # configuration of the criterion here instead of its name.
    criterion: Any = II("criterion._name")  # noqa: RUF009 (fairseq spells defaults taken from elsewhere so)


@dataclass
class HREDConfig(HAEDConfig):
    """Flags of the hierarchical recurrent encoder-decoder: ``haed`` with LSTMs for encoder and main."""

    encoder: ChoiceEnum(["mlp", "lstm"]) = field(  # type: ignore[valid-type]
        default="lstm", metadata={"help": "how a chunk is encoded"}
    )
    main: ChoiceEnum(["transformer", "lstm"]) = field(  # type: ignore[valid-type]
        default="lstm", metadata={"help": "the model over chunks"}
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def resolve(cfg: HAEDConfig, choice: str, kinds: dict[str, dict[str, int]]) -> dict[str, int]:
    """The flags of one kind of part with their defaults; raises ``UsageError`` for a size below the least."""
    kind = str(getattr(cfg, choice))
    given = {name: getattr(cfg, name) for name in kinds[kind]}
    sizes = {name: kinds[kind][name] if value is None else int(value) for name, value in given.items()}
    for name, value in sizes.items():
        least = 0 if name == "position_embed_dim" else 1
        require(value >= least, f"{_flag(name)} must be at least {least}: got {value}")
    return sizes


def validate(cfg: HAEDConfig, task: FairseqTask) -> None:
    """Raise ``UsageError`` where flags break a rule or do not fit together."""
    for name in ("max_segment_len", "token_embed_dim", "decoder_embed_dim", "decoder_units"):
        require(getattr(cfg, name) >= 1, f"{_flag(name)} must be at least 1: got {getattr(cfg, name)}")
    require(
        cfg.encoder_units is None or cfg.encoder_units >= 1,
        f"--encoder-units must be at least 1: got {cfg.encoder_units}",
    )
    require(cfg.init_std is None or cfg.init_std >= 0.0, f"--init-std must be at least 0: got {cfg.init_std}")
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        value = getattr(cfg, name)
        require(0.0 <= value < 1.0, f"{_flag(name)} must be at least 0 and below 1: got {value}")
    validate_positions(cfg)
    require(
        len(task.source_dictionary) == len(task.target_dictionary),
        "--output-dictionary-size must be that of the input dictionary, since a chunk that has been predicted is read "
        f"again: got {len(task.target_dictionary)} symbols for {len(task.source_dictionary)}",
    )
    main = resolve(cfg, "main", MAIN_DEFAULTS)
    room = cfg.decoder_embed_dim - main["position_embed_dim"]
    require(
        room >= 1,
        f"--decoder-embed-dim must exceed --position-embed-dim {main['position_embed_dim']}, so that the chunk "
        f"encoding finds room: got {cfg.decoder_embed_dim}",
    )
    chunk_decoder = resolve(cfg, "decoder", CHUNK_DECODER_DEFAULTS)
    require(
        cfg.local_ffn_embed_dim is None or cfg.local_ffn_embed_dim >= 1,
        f"--local-ffn-embed-dim must be at least 1: got {cfg.local_ffn_embed_dim}",
    )
    heads = chunk_decoder.get("local_attention_heads", 1)
    require(
        cfg.decoder_units % heads == 0,
        f"--local-attention-heads must divide --decoder-units {cfg.decoder_units}: got {heads}",
    )
    separators(cfg, task.source_dictionary)


def refuse_idle(cfg: HAEDConfig) -> None:
    """Raise ``UsageError`` for a flag without effect on what is to be trained; old checkpoints load all the same."""
    for choice, kinds in (("main", MAIN_DEFAULTS), ("decoder", CHUNK_DECODER_DEFAULTS)):
        kind = str(getattr(cfg, choice))
        for name in {name for defaults in kinds.values() for name in defaults} - kinds[kind].keys():
            value = getattr(cfg, name)
            require(value is None, f"{_flag(name)} has no meaning with {_flag(choice)} {kind}: got {value}")
    require(
        str(cfg.decoder) == "transformer" or cfg.local_ffn_embed_dim is None,
        f"--local-ffn-embed-dim has no meaning with --decoder lstm: got {cfg.local_ffn_embed_dim}",
    )
    if {str(cfg.main), str(cfg.decoder)} == {"lstm"}:
        for name in ("activation_fn", "attention_dropout", "activation_dropout", "checkpoint_activations"):
            value, default = getattr(cfg, name), HAEDConfig.__dataclass_fields__[name].default
            require(
                str(value) == str(default),
                f"{_flag(name)} has no meaning without a transformer, with --main lstm and --decoder lstm: got {value}",
            )
    require(
        str(cfg.query) == "none" or is_first_phase(cfg),
        f"--query has no effect without --criterion {IEM_CRITERION}: got {cfg.query}",
    )
    require(
        str(cfg.segmentation) == "words" or cfg.separators is None,
        f"--separators has no meaning with --segmentation fixed: got {cfg.separators!r}",
    )


def separators(cfg: HAEDConfig, dictionary: Dictionary) -> tuple[int, ...]:
    """Indices of the symbols that end a word, none with ``--segmentation fixed``."""
    if str(cfg.segmentation) == "fixed":
        return ()
    if cfg.separators is None:
        space = dictionary.index(SPACE)
        return (dictionary.eos(),) if space == dictionary.unk() else (space, dictionary.eos())
    symbols = cfg.separators.split()
    require(bool(symbols), "--separators must name at least one symbol: got none")
    for symbol in symbols:
        require(
            dictionary.index(symbol) != dictionary.unk(),
            f"--separators must be symbols of the dictionary: got {symbol!r}, which it does not have",
        )
    return tuple(dictionary.index(symbol) for symbol in symbols)


def is_first_phase(cfg: HAEDConfig) -> bool:
    """Whether the criterion trains the implicit embedding matrix, without a decoder."""
    return getattr(cfg.criterion, "_name", cfg.criterion) == IEM_CRITERION
