"""fairseq's decoder and model over a language model of the core."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY, FairseqIncrementalDecoder, FairseqLanguageModel
from torch import Tensor, nn

from fairseq_ms import core
from fairseq_ms.core.streaming import StreamingModel
from fairseq_ms.errors import UsageError
from fairseq_ms.lm import older_names
from fairseq_ms.lm.config import (
    Flags,
    check_needs,
    check_ranges,
    fill_in_positions,
    flag,
    naming_flags,
    require,
    validate,
)
from fairseq_ms.lm.incremental import Decoding, PromptReader

_STATE = "fairseq_ms"
# What fairseq's generator takes for "no limit": a stream has no last position.
NO_LIMIT = 10**6
# What a run may change when it goes on, beside dropout and the start of weights: how it computes, weights of losses and
# the length of texts, which learned positions show.
MAY_CHANGE = (
    *("_name", "checkpoint_activations", "compile", "recompute", "init_residual", "max_target_positions"),
    *("droppath", "criterion", "query", "reconstruction_loss_weight", "bag_of_words_weight"),
)
# What a run of streams may change between two epochs alone.
LENGTHS = ("tokens_per_sample", "mem_len", "compressed_mem_len")


class Decoder(FairseqIncrementalDecoder):
    """fairseq's decoder protocol over a language model of the core.

    Args:
        model: of the core, ``decoder.core``
        dictionary: the target dictionary
        positions: longest sequence of tokens, without the one that ``--add-bos-token`` puts before it
    """

    def __init__(self, model: core.CausalModel, dictionary: Any, positions: int) -> None:
        super().__init__(dictionary)
        self.core = model
        self.positions = positions

    @property
    def adaptive_softmax(self) -> nn.Module | None:
        """The module that fairseq's ``adaptive_loss`` applies to features; None without adaptive softmax."""
        return self.core.adaptive_softmax

    @adaptive_softmax.setter
    def adaptive_softmax(self, none: None) -> None:
        """Ignores the None that fairseq's constructor assigns."""

    @property
    def project(self) -> nn.Module | None:
        """From features to logits; None with adaptive softmax."""
        return self.core.project

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, Tensor] | None = None,
        incremental_state: dict[str, Any] | None = None,
        src_lengths: Tensor | None = None,
        memory: Any = None,
        features_only: bool = False,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits (B, T, V), and ``extra`` with what a streaming model remembers.

        That is the "memory" after the tokens, and the "auxiliary_loss" (B,) that it adds to a training loss, or None.

        With ``incremental_state``, only those at the last position, (B, 1, V), computed from what the state
        has cached; ``encoder_out`` is then what ``PromptReader`` says of the prompts. The state then continues the
        stream, from the ``memory`` of its first call, and ``extra["memory"]`` is None. Padding is on the right;
        since no position sees a later one, ``src_lengths`` changes nothing. With adaptive softmax, features
        (B, T, D) stand in for the logits, as in fairseq's own models.
        """
        extra: dict[str, Any] = {"attn": None, "memory": None}
        if memory is not None and not isinstance(self.core, StreamingModel):
            raise UsageError(f"memory: {type(self.core).__name__} has no memory, so it must be None")
        if incremental_state is not None:
            if _STATE not in incremental_state:
                begin = {"memory": memory} if memory is not None else {}
                incremental_state[_STATE] = Decoding(self.core, partial(self.core.new_state, **begin))
            x_BTD = incremental_state[_STATE].last_features(prev_output_tokens, encoder_out)
        elif isinstance(self.core, StreamingModel):
            x_BTD, extra["memory"], extra["auxiliary_loss"] = self.core.stream(prev_output_tokens, memory)
        else:
            x_BTD = self.core.features(prev_output_tokens)
        return (x_BTD if features_only else self.output_layer(x_BTD)), extra

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: Any = None, incremental_state: Any = None, **unused: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """As ``forward``, without the projection to the vocabulary."""
        return self.forward(prev_output_tokens, encoder_out, incremental_state, features_only=True)

    def output_layer(self, features: Tensor, **unused: Any) -> Tensor:
        """(B, T, D) -> (B, T, V); with adaptive softmax the features themselves."""
        return features if self.project is None else self.project(features)

    def get_normalized_probs_scriptable(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor:
        """Probabilities or their logarithms (B, T, V), of logits or, with adaptive softmax, of features."""
        if self.core.adaptive_softmax is None:
            return super().get_normalized_probs_scriptable(net_output, log_probs, sample)
        found_BTV = self.core.adaptive_softmax.log_probs(net_output[0])
        return found_BTV if log_probs else found_BTV.exp_()

    def max_positions(self) -> int:
        """Longest sequence that learned positions cover; what ``--add-bos-token`` puts before it is not counted."""
        return self.positions if self.core.max_length() is not None else NO_LIMIT

    def reorder_incremental_state_scripting(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """fairseq's hook of beam search: row i becomes what row ``new_order[i]`` was."""
        decoding = incremental_state.get(_STATE)
        if decoding is not None:
            decoding.reorder(new_order)

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """As ``reorder_incremental_state_scripting``."""
        self.reorder_incremental_state_scripting(incremental_state, new_order)


class BaseLanguageModel(FairseqLanguageModel):
    """A language model in fairseq's sense: ``model(src_tokens, src_lengths, memory) -> (logits, extra)``.

    A subclass checks its flags and turns them into a model of the core; it is registered with their dataclass.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self.encoder = PromptReader(decoder.dictionary.pad())

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        memory: Any = None,
        features_only: bool = False,
        **blocks: bool,
    ) -> tuple[Tensor, dict[str, Any]]:
        """src_tokens (B, T) -> logits (B, T, V) and ``extra``, whose "memory" continues a streaming model.

        With ``features_only``, features (B, T, D) stand in for the logits. A model of blocks takes the flags of its
        ``forward_blocks`` as well.
        """
        if any(blocks.values()):
            return self.forward_blocks(src_tokens, features_only, **blocks)
        return self.decoder(src_tokens, src_lengths=src_lengths, memory=memory, features_only=features_only)

    def forward_blocks(self, src_tokens: Tensor, features_only: bool) -> tuple[Tensor, dict[str, Any]]:
        """Outputs of blocks instead of tokens, which a criterion over bags of words trains on."""
        raise AssertionError(f"{type(self).__name__} has no blocks")

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, checkpoint_file: str = "model.pt", data_name_or_path: str = ".", **kwargs: Any
    ) -> Any:
        """fairseq's loading of a model with its tokenisation; raises ``UsageError`` for a folder that is missing.

        fairseq also takes addresses and archives of models, and several checkpoints.
        """
        # Data that begin with a dot are beside the model.
        beside = data_name_or_path.startswith(".")
        for what, path, known in (("model's", model_name_or_path, False), ("data", data_name_or_path, beside)):
            found = known or "://" in path or Path(path).exists()
            require(found, f"from_pretrained: the {what} folder {path} does not exist")
        return super().from_pretrained(model_name_or_path, checkpoint_file, data_name_or_path, **kwargs)

    @classmethod
    def flags(cls) -> Flags:
        """The fields of the configuration with which the class is registered."""
        fields: Flags = getattr(cls, "__dataclass").__dataclass_fields__
        return fields

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        """Raise ``UsageError`` on flags that do not fit together; subclasses add their own rules."""
        validate(cfg, task)

    @classmethod
    def refuse_idle(cls, cfg: Any) -> None:
        """Raise ``UsageError`` on flags that could change nothing; only for a model that is to be trained."""
        check_needs(cls.flags(), cfg)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "BaseLanguageModel":
        """fairseq's entry point; raises ``UsageError`` on flags that do not fit together."""
        positions = cls.check(cfg, task)
        with naming_flags(cls.flags()):
            model = cls.core_model(cfg, task.source_dictionary, task.target_dictionary)
        return cls(Decoder(model, task.target_dictionary, positions))

    @classmethod
    def check(cls, cfg: Any, task: Any) -> int:
        """Raise ``UsageError`` on flags that do not fit together; how many positions a text can have."""
        positions = fill_in_positions(cfg)
        check_ranges(cls.flags(), cfg)
        cls.validate(cfg, task)
        if not getattr(task, "from_checkpoint", False):
            cls.refuse_idle(cfg)
        return positions

    @classmethod
    def changed(cls, then: Mapping[str, Any], now: Any, lengths: bool) -> str | None:
        """The first setting by which weights that were trained as ``then`` would be another model's ``now``; or None.

        Fields that an older ``then`` lacks have their defaults. ``lengths`` compares those of streams, too.
        """
        if ARCH_MODEL_REGISTRY.get(then.get("_name"), cls) is not cls:
            return f"--arch was {then['_name']}"
        lengths &= "mem_len" in cls.flags()
        for name, known in cls.flags().items():
            before, after = then.get(name, known.default), getattr(now, name)
            if name in MAY_CHANGE or name.endswith(("dropout", "init_std")) or (name in LENGTHS and not lengths):
                continue
            if before != after and str(before) != str(after) and not str(before).startswith("${"):
                return f"{flag(name)} was {before} and is {after}"
        return None

    @classmethod
    def core_model(cls, cfg: Any, source_dictionary: Any, target_dictionary: Any) -> core.CausalModel:
        """The model of the core that validated flags describe."""
        raise AssertionError(f"{cls.__name__} must define core_model")

    def upgrade_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bring an older checkpoint's names, in place, to those of today."""
        super().upgrade_state_dict(state_dict)
        older_names.bring_to_today(state_dict, type(self.decoder.core))

    def load_state_dict(self, state_dict: Any, strict: bool = True, model_cfg: Any = None, args: Any = None) -> Any:
        """As fairseq's, with one sentence for a checkpoint that another architecture wrote."""
        try:
            return super().load_state_dict(state_dict, strict, model_cfg, args)
        except RuntimeError as error:
            if "state_dict" not in str(error) and "size mismatch" not in str(error):
                raise
            first = str(error).split("\n\t")[1] if "\n\t" in str(error) else str(error)
            raise UsageError(
                f"the checkpoint does not fit this {type(self).__name__}: its {self._difference(state_dict)} "
                f"({first.strip()})"
            ) from error

    def _difference(self, state_dict: dict[str, Any]) -> str:
        """Whether the dictionary, ``--output-dictionary-size`` or something else differs, judging by tensor shapes."""
        sizes = self.decoder.core.config
        symbols = {sizes.vocab_size, len(self.decoder.dictionary)}
        # One number a symbol, or more, whose other sizes are the same.
        own = {name: value for name, value in self.state_dict().items() if value.dim() > 1 and len(value) in symbols}
        own = {name: value for name, value in own.items() if name in state_dict}
        others = [(state_dict[name], value) for name, value in own.items() if len(state_dict[name]) != len(value)]
        if not others or any(other.shape[1:] != value.shape[1:] for other, value in others):
            return "--arch, --positions, sizes or dictionary differ"
        (other, value), *_ = others
        what = "dictionary" if len(others) == len(own) else "--output-dictionary-size"
        return f"{what} is {len(other)} symbols large, and here it is {len(value)}"
