"""What the streaming models share: segments, and a memory that is passed in and out.

A stream is cut into segments of ``tokens_per_sample`` tokens, counted from the stream's beginning. Within a
segment attention is causal; at its end the memory moves on. A call may bring any number of tokens.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_REGISTRY
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor, nn

from fairseq_ms.core.layers import TokenEmbedding
from fairseq_ms.core.ops.idle import keep_in_graph
from fairseq_ms.core.ops.recompute import Dropout
from fairseq_ms.core.ops.relative_attention import Sinusoids
from fairseq_ms.core.streaming.layer import TransformerXLLayer
from fairseq_ms.core.streaming.memory import Memory, Mems
from fairseq_ms.decoding.incremental import Decoding
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.decoding.streaming import Continuation
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.base import Decoder, LanguageModel
from fairseq_ms.lm.choices import Activation
from fairseq_ms.lm.config import LanguageModelConfig, layer_config, refuse_given, require
from fairseq_ms.lm.vocabulary import embedding_std

# What fairseq's generator takes for "no limit": a stream has no last position.
_NO_LIMIT = 10**6


@dataclass
class StreamingConfig(LanguageModelConfig):
    """Flags of every streaming model."""

    activation_fn: Activation = field(
        default="relu", metadata={"help": "activation function of the feed-forward blocks"}
    )
    decoder_normalize_before: bool = field(
        default=False, metadata={"help": "apply layernorm before each decoder block"}
    )
    attention_head_dim: Optional[int] = field(
        default=None, metadata={"help": "width of an attention head (default: --decoder-embed-dim / heads)"}
    )
    mem_len: int = field(
        default=16, metadata={"help": "number of states before the segment that every layer remembers"}
    )
    proj_init_std: float = field(
        default=0.01,
        metadata={
            "help": "standard deviation of the normal distribution projections of adaptive input and softmax start from"
        },
    )


class StreamingDecoder(Decoder):
    """fairseq's decoder protocol over a model that works segment by segment.

    A subclass builds its layers with ``make_layer`` and implements ``forward_segment``, says what its memory is
    (``memory_lengths``, ``memory_reach``), and names the state that decodes token by token.
    """

    has_position_embedding = False
    # Whether ``forward_segment`` returns a loss for whole segments in training.
    has_auxiliary_loss = False

    def __init__(self, cfg: StreamingConfig, dictionary: Dictionary, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.segment_len = int(cfg.tokens_per_sample or 0)
        self.mem_len = int(cfg.mem_len)
        # How many keys a whole segment's attention has, equally many at all scales: the memory's and its own.
        self.window = self.mem_len + self.segment_len
        self.layers_cfg = layer_config(
            cfg, normalize_before=cfg.decoder_normalize_before, head_dim=cfg.attention_head_dim
        )
        self.scale = math.sqrt(cfg.decoder_embed_dim)
        self.drop = Dropout(self.layers_cfg.dropout, self.layers_cfg.recompute)
        self.table = Sinusoids(cfg.decoder_embed_dim)
        shape = self.layers_cfg.heads, self.layers_cfg.width_of_head
        # Shared by the attention of all layers.
        self.u = nn.Parameter(torch.empty(shape))
        self.v = nn.Parameter(torch.empty(shape))

    def make_layer(self) -> TransformerXLLayer:
        """One Transformer-XL layer."""
        return TransformerXLLayer(self.layers_cfg, self.u, self.v)

    @abstractmethod
    def forward_segment(self, x_BTD: Tensor, mems: Mems, positions: Tensor) -> tuple[Tensor, Mems, Tensor | None]:
        """The model over one segment, as its paper lists it.

        Args:
            x_BTD: the embedded segment, the last one of a call perhaps unfinished
            mems: the states it starts from
            positions: ``sinusoids`` of the window

        Returns:
            outputs (B, T, D), the states the next segment starts from if this one is whole, and a loss of the
            memory's own to train on or None
        """

    @abstractmethod
    def state_after(self, memory: Memory) -> DecodingState:
        """The state of a cached decoding that continues a memory."""

    @abstractmethod
    def memory_lengths(self) -> dict[str, int]:
        """The names of the memory's states and how many positions each has."""

    @abstractmethod
    def memory_reach(self) -> int:
        """How many segments back a segment's outputs can depend on, at most."""

    def idle_without_a_whole_segment(self) -> Iterable[nn.Parameter]:
        """The parameters that training on less than a segment may leave without work."""
        return ()

    def memory_flags(self) -> dict[str, int | str]:
        """The flags that ``memory_lengths`` come from, beside the segment's, and their values."""
        return {"--mem-len": self.mem_len}

    def sinusoids(self) -> Tensor:
        """Sinusoids of the distances in a window, with dropout as in Transformer-XL."""
        return self.drop(self.table(self.window, self.u))

    def new_memory(self, batch_size: int) -> Memory:
        """The memory of B streams before their first tokens: zeros (Transformer-QL, Figures 2e and 3, line 3)."""
        like, dim = self.u, self.layers_cfg.dim
        states = {name: like.new_zeros(batch_size, length, dim) for name, length in self.memory_lengths().items()}
        pending = torch.zeros(batch_size, 0, dtype=torch.long, device=like.device)
        return Memory({name: state.detach() for name, state in states.items()}, pending)

    def stream(self, tokens_BT: Tensor, memory: Memory | None) -> tuple[Tensor, Memory, Tensor | None]:
        """Features (B, T, D) of tokens that follow the memory, the memory after them, and its loss (B,) or None."""
        memory = self._checked(memory, tokens_BT)
        mems, known = memory.states, memory.pending_BT.size(1)
        tokens_BT = torch.cat([memory.pending_BT, tokens_BT], dim=1)
        whole = tokens_BT.size(1) - tokens_BT.size(1) % self.segment_len
        outputs, losses = [], []
        for s_BTD in self.embed_tokens(tokens_BT).split(self.segment_len, dim=1):
            y_BTD, new, loss = self.forward_segment(s_BTD, mems, self.sinusoids())
            outputs.append(y_BTD)
            mems = new if s_BTD.size(1) == self.segment_len else mems
            losses += [loss] if loss is not None else []
        y_BTD = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        if not whole and self.training:
            y_BTD = keep_in_graph(y_BTD, self.idle_without_a_whole_segment())
        if self.training and self.has_auxiliary_loss and not losses:
            # Processes add up what they log by position, so it must not depend on the batch what that is.
            losses = [y_BTD.new_zeros(y_BTD.size(0))]
        loss_B = torch.stack(losses).mean(dim=0) if losses else None
        return self.drop(y_BTD[:, known:]), Memory(mems, tokens_BT[:, whole:]), loss_B

    def features_with_memory(self, tokens_BT: Tensor, memory: Memory | None) -> tuple[Tensor, dict[str, Any]]:
        """As the base's; ``auxiliary_loss`` is what the memory adds to a training loss (B,), or None."""
        x_BTD, after, loss = self.stream(tokens_BT, memory)
        return x_BTD, {"memory": after, "auxiliary_loss": loss}

    def features(self, tokens_BT: Tensor) -> Tensor:
        return self.stream(tokens_BT, None)[0]

    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        return self.state_after(self.new_memory(batch_size))

    def new_decoding(self, memory: Memory | None) -> Decoding:
        if memory is None:
            return Decoding(self)
        return Decoding(Continuation(self, self._checked(memory, memory.pending_BT)))

    def max_positions(self) -> int:
        """No limit: a stream is as long as it likes."""
        return _NO_LIMIT

    def embed_tokens(self, tokens_BT: Tensor) -> Tensor:
        """Transformer-QL, Figure 2e, line 6: (B, T) -> (B, T, D)."""
        return self.embed(tokens_BT) * self.scale

    def _checked(self, memory: object, tokens_BT: Tensor) -> Memory:
        """The memory, or a new one; raises UsageError if it is not one of this model and batch."""
        if memory is None:
            return self.new_memory(tokens_BT.size(0))
        if not isinstance(memory, Memory):
            raise UsageError(f"memory: must be None or the extra['memory'] of a call before, got {type(memory)}")
        found = {name: state.size(1) for name, state in memory.states.items()}
        if found != self.memory_lengths() or memory.batch_size != tokens_BT.size(0):
            raise UsageError(
                f"memory: must hold {self.memory_lengths()} states of {tokens_BT.size(0)} streams, "
                f"got {found} of {memory.batch_size}"
            )
        return memory.to(self.u)


def with_a_memory() -> list[str]:
    """The architectures that the streaming task is for."""
    return sorted(name for name, model in MODEL_REGISTRY.items() if issubclass(model, StreamingLanguageModel))


class StreamingLanguageModel(LanguageModel):
    """A language model with a memory; ``extra["memory"]`` of a call continues the stream in the next."""

    decoder: StreamingDecoder

    @classmethod
    def build_model(cls, cfg: StreamingConfig, task: object) -> LanguageModel:
        """As the base's; the task's ``--tokens-per-sample`` is the segment length, or else the trained one.

        Raises UsageError under a task that would begin every block without a memory.
        """
        name = next((name for name, known in TASK_REGISTRY.items() if known is type(task)), None)
        require(
            not isinstance(task, LanguageModelingTask) or hasattr(task, "carried"),
            "--task must be streaming_language_modeling for a model with a memory "
            f"({', '.join(with_a_memory())}): got {name}",
        )
        given = getattr(getattr(task, "args", None) or getattr(task, "cfg", None), "tokens_per_sample", None)
        if given is not None:
            cfg.tokens_per_sample = given
        require(
            cfg.tokens_per_sample is not None and cfg.tokens_per_sample >= 1,
            f"--tokens-per-sample must be at least 1, the length of a segment: got {cfg.tokens_per_sample}",
        )
        # There are no position embeddings that it could exceed.
        cfg.max_target_positions = cfg.tokens_per_sample
        model = super().build_model(cfg, task)
        nn.init.normal_(model.decoder.u, std=cfg.init_std)
        nn.init.normal_(model.decoder.v, std=cfg.init_std)
        for module in model.modules():
            if isinstance(module, AdaptiveInput | AdaptiveSoftmax):
                _initialise_adaptive(module, embedding_std(cfg), cfg.proj_init_std)
        return model

    @classmethod
    def validate(cls, cfg: StreamingConfig, task: object) -> None:
        require(not cfg.add_bos_token, "--add-bos-token cannot be used with a streaming model: got True")
        super().validate(cfg, task)
        require(cfg.mem_len >= 0, f"--mem-len must be at least 0: got {cfg.mem_len}")
        require(cfg.proj_init_std >= 0.0, f"--proj-init-std must be at least 0: got {cfg.proj_init_std}")

    @classmethod
    def refuse_idle(cls, cfg: StreamingConfig) -> None:
        super().refuse_idle(cfg)
        if not (cfg.adaptive_input or cfg.adaptive_softmax_cutoff):
            why = "without --adaptive-input or --adaptive-softmax-cutoff"
            refuse_given(StreamingConfig, cfg, ("proj_init_std",), why)


def _initialise_adaptive(module: nn.Module, std: float, projection_std: float) -> None:
    """fairseq's adaptive embeddings and projections, started as Transformer-XL starts its own."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=std)
            if part.padding_idx is not None:
                nn.init.zeros_(part.weight[part.padding_idx])
        elif isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=projection_std)
