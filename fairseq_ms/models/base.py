"""What every language model here is made of: its flags, its fairseq decoder and its fairseq model."""

import logging
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from fairseq import options
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from omegaconf import II
from torch import Tensor, nn

from fairseq_ms.errors import UsageError
from fairseq_ms.models.decoding import Decoding, PromptReader
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.feedforward import ACTIVATIONS
from fairseq_ms.modules.layer import LayerConfig
from fairseq_ms.modules.output import TiedOutput, untied_output
from fairseq_ms.modules.state import DecodingState

logger = logging.getLogger(__name__)

_STATE = "fairseq_ms"


@dataclass
class LanguageModelConfig(FairseqDataclass):
    """Flags of every language model; names and meanings are fairseq's where fairseq has them."""

    activation_fn: ChoiceEnum(list(ACTIVATIONS)) = field(  # type: ignore[valid-type]
        default="gelu", metadata={"help": "activation function of the feed-forward blocks"}
    )
    dropout: float = field(default=0.1, metadata={"help": "dropout probability"})
    attention_dropout: float = field(default=0.1, metadata={"help": "dropout probability for attention weights"})
    activation_dropout: float = field(default=0.0, metadata={"help": "dropout probability after activation in FFN"})
    decoder_embed_dim: int = field(default=768, metadata={"help": "model dimension"})
    decoder_ffn_embed_dim: int = field(default=3072, metadata={"help": "width of the feed-forward blocks"})
    decoder_attention_heads: int = field(default=12, metadata={"help": "number of attention heads"})
    share_decoder_input_output_embed: bool = field(
        default=False, metadata={"help": "share decoder input and output embeddings"}
    )
    adaptive_input: bool = field(default=False, metadata={"help": "if set, uses adaptive input"})
    adaptive_input_factor: float = field(default=4, metadata={"help": "adaptive input factor"})
    adaptive_input_cutoff: Optional[str] = field(
        default=None, metadata={"help": "comma separated list of adaptive input cutoff points"}
    )
    adaptive_softmax_cutoff: Optional[str] = field(
        default=None,
        metadata={
            "help": "comma separated list of adaptive softmax cutoff points. Must be used with adaptive_loss criterion"
        },
    )
    adaptive_softmax_dropout: float = field(
        default=0, metadata={"help": "sets adaptive softmax dropout for the tail projections"}
    )
    adaptive_softmax_factor: float = field(default=4, metadata={"help": "adaptive softmax factor"})
    tie_adaptive_weights: bool = field(
        default=False, metadata={"help": "if set, ties the weights of adaptive softmax and adaptive input"}
    )
    tie_adaptive_proj: bool = field(
        default=False,
        metadata={"help": "if set, ties the projection weights of adaptive softmax and adaptive input"},
    )
    init_std: float = field(
        default=0.02, metadata={"help": "standard deviation of the normal distribution weights start from"}
    )
    checkpoint_activations: bool = field(
        default=False,
        metadata={"help": "keep only the input of every layer, and run the layer again in backward"},
    )
    recompute: ChoiceEnum(["pointwise", "none"]) = field(  # type: ignore[valid-type]
        default="pointwise",
        metadata={
            "help": "what to compute again in backward instead of keeping it: layer norm, activation, "
            "dropout masks and scores of attention with dropout (pointwise), or nothing (none)"
        },
    )
    add_bos_token: bool = II("task.add_bos_token")
    tokens_per_sample: int = II("task.tokens_per_sample")
    max_target_positions: Optional[int] = II("task.max_target_positions")


def require(condition: bool, message: str) -> None:
    """Raise ``UsageError(message)`` unless the condition holds."""
    if not condition:
        raise UsageError(message)


def layer_config(cfg: LanguageModelConfig, **changes: Any) -> LayerConfig:
    """The pre-LN layers that the flags ask for."""
    settings = {
        "dim": cfg.decoder_embed_dim,
        "ffn_dim": cfg.decoder_ffn_embed_dim,
        "heads": cfg.decoder_attention_heads,
        "dropout": cfg.dropout,
        "attention_dropout": cfg.attention_dropout,
        "activation_dropout": cfg.activation_dropout,
        "activation": str(cfg.activation_fn),
        "recompute": str(cfg.recompute) == "pointwise",
        "checkpoint": cfg.checkpoint_activations,
    }
    return LayerConfig(**{**settings, **changes})


class Decoder(FairseqIncrementalDecoder):
    """fairseq's decoder protocol over a language model that maps tokens to features.

    A subclass builds its layers on ``self.embed`` and implements ``features``, ``step`` and ``new_state``.

    Args:
        cfg: the model's flags
        dictionary: the target dictionary
        embed: word and position embeddings
    """

    def __init__(self, cfg: LanguageModelConfig, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(dictionary)
        self.embed = embed
        self.positions = int(cfg.max_target_positions or cfg.tokens_per_sample)
        self.adaptive_softmax = _adaptive_softmax(cfg, len(dictionary), embed.words)
        self.project: nn.Module | None = None
        if self.adaptive_softmax is None and cfg.share_decoder_input_output_embed:
            self.project = TiedOutput(embed.words)  # type: ignore[arg-type]
        elif self.adaptive_softmax is None:
            self.project = untied_output(cfg.decoder_embed_dim, len(dictionary))

    @abstractmethod
    def features(self, tokens_BT: Tensor, state: DecodingState | None = None) -> Tensor:
        """Features (B, T, D) of all positions at once; given a fresh state, leave it as after these tokens."""

    @abstractmethod
    def step(self, tokens_B1: Tensor, state: DecodingState) -> Tensor:
        """Features (B, 1, D) of one more token of every row; the state moves on by it."""

    @abstractmethod
    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        """The state before the first token, with room for about ``capacity`` of them."""

    def features_with_memory(self, tokens_BT: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """Features (B, T, D) and the memory after them; only streaming models have one."""
        if memory is not None:
            raise UsageError(f"memory: {type(self).__name__} has no memory, so it must be None")
        return self.features(tokens_BT), None

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, Tensor] | None = None,
        incremental_state: dict[str, Any] | None = None,
        src_lengths: Tensor | None = None,
        memory: Any = None,
        features_only: bool = False,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits (B, T, V), and ``extra`` with the new memory of a streaming model.

        With ``incremental_state``, only those at the last position, (B, 1, V), computed from what the state
        has cached; ``encoder_out`` is then what ``PromptReader`` says of the prompts. Padding is on the right;
        since no position sees a later one, ``src_lengths`` changes nothing. With adaptive softmax, features
        (B, T, D) stand in for the logits, as in fairseq's own models.
        """
        if incremental_state is not None:
            decoding = incremental_state.get(_STATE)
            if decoding is None:
                decoding = incremental_state[_STATE] = self.new_decoding(memory)
            x_BTD = decoding.last_features(prev_output_tokens, encoder_out)
        else:
            x_BTD, memory = self.features_with_memory(prev_output_tokens, memory)
        extra = {"attn": None, "memory": memory}
        return (x_BTD if features_only else self.output_layer(x_BTD)), extra

    def new_decoding(self, memory: Any) -> Decoding:
        """The start of a cached decoding; streaming models start from a memory."""
        if memory is not None:
            raise UsageError(f"memory: {type(self).__name__} has no memory, so it must be None")
        return Decoding(self)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """As ``forward``, without the projection to the vocabulary."""
        return self.forward(prev_output_tokens, encoder_out, incremental_state, features_only=True)

    def output_layer(self, features: Tensor, **unused: Any) -> Tensor:
        """(B, T, D) -> (B, T, V); with adaptive softmax the features themselves."""
        return features if self.project is None else self.project(features)

    def max_positions(self) -> int:
        """Longest sequence the position embedding covers."""
        return self.positions

    def reorder_incremental_state_scripting(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """fairseq's hook of beam search: row i becomes what row ``new_order[i]`` was."""
        decoding = incremental_state.get(_STATE)
        if decoding is not None:
            decoding.reorder(new_order)

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """As ``reorder_incremental_state_scripting``."""
        self.reorder_incremental_state_scripting(incremental_state, new_order)

    def like(self) -> Tensor:
        """A parameter, for the type and device of new buffers."""
        return next(self.parameters())


class LanguageModel(FairseqLanguageModel):
    """A language model in fairseq's sense: ``model(src_tokens, src_lengths, memory) -> (logits, extra)``.

    A subclass names its decoder and checks its flags; it is registered with its config dataclass.
    """

    decoder_class: ClassVar[type[Decoder]]

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self.encoder = PromptReader(decoder.dictionary.pad())

    def forward(  # type: ignore[override]
        self, src_tokens: Tensor, src_lengths: Tensor | None = None, memory: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """src_tokens (B, T) -> logits (B, T, V) and ``extra``, whose "memory" continues a streaming model."""
        return self.decoder(src_tokens, src_lengths=src_lengths, memory=memory)

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        """Raise ``UsageError`` on flags that do not fit together; subclasses add their own rules."""
        _validate(cfg, task)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "LanguageModel":
        """fairseq's entry point; raises ``UsageError`` on flags that do not fit together."""
        if getattr(cfg, "max_target_positions", None) is None:
            cfg.max_target_positions = cfg.tokens_per_sample
        cls.validate(cfg, task)
        embed = TokenEmbedding(
            _word_embedding(cfg, task.source_dictionary),
            int(cfg.max_target_positions) if cls.has_position_embedding(cfg) else None,
            cfg.decoder_embed_dim,
            cfg.dropout,
            str(cfg.recompute) == "pointwise",
        )
        decoder = cls.decoder_class(cfg, task.target_dictionary, embed)
        _initialise(decoder, cfg.init_std)
        return cls(decoder)

    @classmethod
    def has_position_embedding(cls, cfg: Any) -> bool:
        """Whether learned positions are added to the word embeddings."""
        return True

    def load_state_dict(self, state_dict: Any, strict: bool = True, model_cfg: Any = None, args: Any = None) -> Any:
        """As fairseq's, with one sentence for a checkpoint that another architecture wrote."""
        try:
            return super().load_state_dict(state_dict, strict, model_cfg, args)
        except RuntimeError as error:
            if "state_dict" not in str(error) and "size mismatch" not in str(error):
                raise
            first = str(error).split("\n\t")[1] if "\n\t" in str(error) else str(error)
            raise UsageError(
                f"the checkpoint does not fit this {type(self).__name__}: its --arch or sizes differ ({first.strip()})"
            ) from error


def _validate(cfg: Any, task: Any) -> None:
    positions = int(cfg.max_target_positions)
    require(
        cfg.tokens_per_sample <= positions,
        f"--tokens-per-sample must not exceed --max-target-positions {positions}: got {cfg.tokens_per_sample}",
    )
    dim, heads = cfg.decoder_embed_dim, cfg.decoder_attention_heads
    require(
        heads > 0 and dim % heads == 0,
        f"--decoder-attention-heads must divide --decoder-embed-dim {dim}: got {heads}",
    )
    for flag in ("dropout", "attention_dropout", "activation_dropout", "adaptive_softmax_dropout"):
        value = getattr(cfg, flag)
        name = "--" + flag.replace("_", "-")
        require(0.0 <= value < 1.0, f"{name} must be at least 0 and below 1: got {value}")
    require(
        not (cfg.adaptive_input and cfg.share_decoder_input_output_embed),
        "--share-decoder-input-output-embed cannot be used with --adaptive-input: use --tie-adaptive-weights",
    )
    require(
        not (cfg.adaptive_softmax_cutoff and cfg.share_decoder_input_output_embed),
        "--share-decoder-input-output-embed cannot be used with --adaptive-softmax-cutoff "
        f"{cfg.adaptive_softmax_cutoff}: use --adaptive-input and --tie-adaptive-weights",
    )
    require(
        not cfg.share_decoder_input_output_embed or len(task.source_dictionary) == len(task.target_dictionary),
        "--share-decoder-input-output-embed needs source and target dictionaries of one size: got "
        f"{len(task.source_dictionary)} and {len(task.target_dictionary)}",
    )
    require(
        not cfg.adaptive_input or bool(cfg.adaptive_input_cutoff),
        "--adaptive-input needs --adaptive-input-cutoff: got none",
    )
    if cfg.tie_adaptive_weights or cfg.tie_adaptive_proj:
        flag = "--tie-adaptive-weights" if cfg.tie_adaptive_weights else "--tie-adaptive-proj"
        require(
            cfg.adaptive_input and cfg.adaptive_input_cutoff == cfg.adaptive_softmax_cutoff,
            f"{flag} needs --adaptive-input and --adaptive-input-cutoff equal to --adaptive-softmax-cutoff: "
            f"got {cfg.adaptive_input_cutoff} and {cfg.adaptive_softmax_cutoff}",
        )
        require(
            cfg.adaptive_input_factor == cfg.adaptive_softmax_factor,
            f"{flag} needs --adaptive-input-factor equal to --adaptive-softmax-factor: "
            f"got {cfg.adaptive_input_factor} and {cfg.adaptive_softmax_factor}",
        )


def _word_embedding(cfg: Any, dictionary: Any) -> nn.Module:
    if not cfg.adaptive_input:
        return nn.Embedding(len(dictionary), cfg.decoder_embed_dim, dictionary.pad())
    return AdaptiveInput(
        len(dictionary),
        dictionary.pad(),
        cfg.decoder_embed_dim,
        cfg.adaptive_input_factor,
        cfg.decoder_embed_dim,
        options.eval_str_list(cfg.adaptive_input_cutoff, type=int),
    )


def _adaptive_softmax(cfg: Any, vocabulary: int, words: nn.Module) -> AdaptiveSoftmax | None:
    if not cfg.adaptive_softmax_cutoff:
        return None
    return AdaptiveSoftmax(
        vocabulary,
        cfg.decoder_embed_dim,
        options.eval_str_list(cfg.adaptive_softmax_cutoff, type=int),
        dropout=cfg.adaptive_softmax_dropout,
        factor=cfg.adaptive_softmax_factor,
        adaptive_inputs=words if cfg.tie_adaptive_weights else None,
        tie_proj=cfg.tie_adaptive_proj,
    )


def _initialise(module: nn.Module, std: float) -> None:
    """Weights normal around 0, biases 0, padding embedding 0; fairseq's adaptive modules keep their own."""
    if isinstance(module, AdaptiveInput | AdaptiveSoftmax):
        return
    if isinstance(module, nn.Linear | nn.Conv1d | nn.ConvTranspose1d):
        nn.init.normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=std)
        if module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])
    for child in module.children():
        _initialise(child, std)
