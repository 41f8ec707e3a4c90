"""``haed`` and ``hred``; ``iem.py`` has the model of their first phase."""

# fairseq reads the types of a configuration's fields, so its annotations must not become strings.

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Optional

from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel, register_model
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor, nn

from fairseq_ms import core
from fairseq_ms.lm.base import NO_LIMIT, BaseLanguageModel
from fairseq_ms.lm.choices import ChunkEncoder, Part, Query, Segmentation, option, probability
from fairseq_ms.lm.config import (
    PositionFlags,
    criterion_of,
    layer_settings,
    naming_flags,
    of_core,
    refuse_given,
    require,
    symbols_of,
    validate_positions,
)
from fairseq_ms.models.iem import IEM_CRITERION, ImplicitEmbeddingModel

logger = logging.getLogger(__name__)

SPACE = "▁"
"""The symbol for a space in character data, as in sentencepiece."""

# Fields of the core whose flags need not be given.
_SIZES = (
    *("encoder_units", "position_dim", "layers", "ffn_dim", "heads", "head_dim", "main_units"),
    *("local_layers", "local_heads", "local_ffn_dim"),
)

# Flags of both transformers, the main model and the decoder.
_OF_TRANSFORMERS = (
    *("activation_fn", "attention_dropout", "activation_dropout", "checkpoint_activations"),
    *("norm", "decoder_normalize_after", "qk_norm", "sinks", "short_conv", "no_bias", "init_residual"),
)


_of_main = partial(option, None, least=1, needs=["main transformer"])
_of_decoder = partial(option, None, least=1, needs=["decoder transformer"])


@dataclass
class HAEDFlags(PositionFlags):
    """Flags of the hierarchical encoder-decoder; the spelling is fairseq's where fairseq has one."""

    segmentation: Segmentation = option(
        "words", "where a chunk ends: after a separator or at --max-segment-len, or only at that length"
    )
    max_segment_len: int = option(12, "greatest number of tokens in a chunk", least=1)
    separators: Optional[str] = option(
        None,
        "symbols that end a word, separated by spaces, with --segmentation words "
        f"(default: {SPACE}, if the dictionary has it, and the end of a line)",
        needs=["segmentation words"],
    )
    encoder: ChunkEncoder = option("mlp", "how a chunk is encoded")
    main: Part = option("transformer", "the model over chunks")
    decoder: Part = option("lstm", "the model over the tokens of one chunk")
    token_embed_dim: int = option(10, "width of the token embeddings", least=1)
    encoder_units: Optional[int] = option(None, "units of the encoder (default: 256 for mlp, 1024 for lstm)", least=1)
    decoder_embed_dim: int = option(356, "width of the main model: chunk encoding plus position embedding", least=1)
    position_embed_dim: Optional[int] = option(
        None,
        "width of the position embedding beside the encoding (default: 100 for a transformer main with --positions "
        "learned, else 0)",
        least=0,
    )
    decoder_layers: Optional[int] = _of_main("layers of a transformer main (default: 6)")
    decoder_ffn_embed_dim: Optional[int] = _of_main("feed-forward width of a transformer main (default: 1424)")
    decoder_attention_heads: Optional[int] = _of_main("attention heads of a transformer main (default: 8)")
    attention_head_dim: Optional[int] = _of_main("width of such a head (default: 32)")
    main_units: Optional[int] = option(None, "units of an lstm main (default: 1500)", least=1, needs=["main lstm"])
    decoder_units: int = option(1024, "units of the decoder: hidden units, or its width", least=1)
    local_layers: Optional[int] = _of_decoder("layers of a transformer decoder (default: 2)")
    local_attention_heads: Optional[int] = _of_decoder("attention heads of a transformer decoder (default: 8)")
    local_ffn_embed_dim: Optional[int] = _of_decoder(
        "feed-forward width of a transformer decoder (default: 4 x --decoder-units)"
    )
    query: Query = option(
        "none",
        "first phase only: multiply the main model's output with chunk encodings as it is, as far as these "
        "are wide (none), or after a learned projection that the second phase drops (linear)",
        needs=[f"criterion {IEM_CRITERION}"],
    )
    dropout: float = probability(0.0, "dropout probability")
    attention_dropout: float = probability(0.0, "dropout probability for attention weights")
    init_std: Optional[float] = option(
        None,
        "standard deviation of the normal distribution all weights start from (default: 0.02 in transformers, "
        "elsewhere torch's own start)",
        least=0,
    )
    # Decides the phase: the implicit embedding matrix is trained without a decoder.
    criterion: Any = II("criterion._name")


@dataclass
class HREDFlags(HAEDFlags):
    """Flags of the hierarchical recurrent encoder-decoder: ``haed`` with LSTMs for encoder and main."""

    encoder: ChunkEncoder = option("lstm", "how a chunk is encoded")
    main: Part = option("lstm", "the model over chunks")


def core_config(cfg: HAEDFlags, dictionary: Dictionary, kind: type[core.HAEDConfig]) -> core.HAEDConfig:
    """The sizes that flags describe."""
    sizes = {**layer_settings(cfg), **of_core(cfg, *_SIZES)}
    settings: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    settings |= of_core(cfg, "segmentation", "encoder", "main", "decoder")
    settings |= of_core(cfg, "max_segment_len", "token_dim", "decoder_units", "init_std")
    return kind(
        vocab_size=len(dictionary),
        padding_idx=dictionary.pad(),
        max_positions=int(cfg.max_target_positions or 0),
        separators=separators(cfg, dictionary),
        **settings,
    )


def separators(cfg: HAEDFlags, dictionary: Dictionary) -> tuple[int, ...]:
    """Indices of the symbols that end a word, none with ``--segmentation fixed``."""
    if str(cfg.segmentation) == "fixed":
        return ()
    if cfg.separators is None:
        space = dictionary.index(SPACE)
        return (dictionary.eos(),) if space == dictionary.unk() else (space, dictionary.eos())
    require(bool(cfg.separators.split()), "--separators must name at least one symbol: got none")
    return tuple(symbols_of("--separators", cfg.separators, dictionary))


@register_model("haed", dataclass=HAEDFlags)
class HAEDLanguageModel(BaseLanguageModel):
    """Hierarchical attention encoder-decoder: MLP encoder, transformer main model, LSTM decoder, unless told otherwise.

    With ``--finetune-from-model``, a checkpoint of the first phase gives it its encoder and main model.
    """

    core_class: ClassVar[type[core.HAED]] = core.HAED
    config_class: ClassVar[type[core.HAEDConfig]] = core.HAEDConfig

    @classmethod
    def build_model(cls, cfg: HAEDFlags, task: FairseqTask) -> BaseFairseqModel:
        """The model of the phase that the criterion trains; raises ``UsageError`` on flags that do not fit together.

        That is this class, with an encoder, a main model and a decoder, unless the criterion is that of the implicit
        embedding matrix: then it is an ``ImplicitEmbeddingModel``.
        """
        if criterion_of(cfg) != IEM_CRITERION:
            whole = super().build_model(cfg, task)
            in_groups(whole.decoder.core)
            return whole
        positions = cls.check(cfg, task)
        with naming_flags(cls.flags()):
            config = core_config(cfg, task.source_dictionary, cls.config_class)
            longest = positions if config.longest_text is not None else NO_LIMIT
            model = ImplicitEmbeddingModel(config, str(cfg.query) == "linear", longest)
        in_groups(model)
        return model

    @classmethod
    def core_model(cls, cfg: HAEDFlags, source_dictionary: Dictionary, target_dictionary: Dictionary) -> core.HAED:
        return cls.core_class(core_config(cfg, source_dictionary, cls.config_class))

    @classmethod
    def validate(cls, cfg: HAEDFlags, task: FairseqTask) -> None:
        validate_positions(cfg)
        require(
            len(task.source_dictionary) == len(task.target_dictionary),
            "--output-dictionary-size must be that of the input dictionary, since a chunk that has been predicted is "
            f"read again: got {len(task.target_dictionary)} symbols for {len(task.source_dictionary)}",
        )

    @classmethod
    def refuse_idle(cls, cfg: HAEDFlags) -> None:
        super().refuse_idle(cfg)
        if {str(cfg.main), str(cfg.decoder)} == {"lstm"}:
            why = "without a transformer, with --main lstm and --decoder lstm"
            refuse_given(cls.flags(), cfg, _OF_TRANSFORMERS, why)

    def upgrade_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Complete a checkpoint of the first phase, in place, with this model's own new decoder."""
        super().upgrade_state_dict(state_dict)
        # A language model has all its parameters in fairseq's decoder.
        loaded = [name for name in state_dict if name.startswith(("encoder.", "main."))]
        if not loaded:
            return
        dropped = [name for name in state_dict if name.startswith("query.")]
        for name in dropped:
            del state_dict[name]
        for name in loaded:
            state_dict[f"decoder.core.{name}"] = state_dict.pop(name)
        new = {name: value for name, value in self.state_dict().items() if name not in state_dict}
        state_dict.update(new)
        logger.info(
            "from the first phase: %s loaded; new: %s; not needed any more: %s",
            *(_listed(names) for names in (loaded, new, dropped)),
        )


@register_model("hred", dataclass=HREDFlags)
class HREDLanguageModel(HAEDLanguageModel):
    """Hierarchical recurrent encoder-decoder: LSTMs for encoder, main model and decoder, unless told otherwise."""

    core_class = core.HRED
    config_class = core.HREDConfig


def in_groups(model: nn.Module) -> None:
    """Name the groups of parameters to which fairseq's composite optimizer gives settings of their own."""
    for name, parameter in model.named_parameters():
        part = name.split(".")[0]
        group = {"encoder": "encoder", "main": "main", "query": "main"}.get(part, "decoder")
        parameter.param_group = group  # type: ignore[attr-defined]


def _listed(names: Iterable[str]) -> str:
    """Names of parameters, by the leading parts of their names, with the number of tensors of each."""
    parts: Counter[str] = Counter()
    for name in names:
        first, second, *_ = name.removeprefix("decoder.core.").split(".")
        parts[first if first in ("encoder", "main") else f"{first}.{second}"] += 1
    return ", ".join(f"{part} ({count} tensors)" for part, count in parts.items()) or "nothing"
