"""What models with a segment memory share: segments attend to states of earlier segments.

Segments have ``segment_len`` tokens, counted from the beginning of the stream. Attention is causal within a segment; at
its end, its states move into the memory. A call may bring any number of tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.adaptive import AdaptiveInput, AdaptiveSoftmax
from fairseq_ms.core.config import ModelConfig
from fairseq_ms.core.layers import ResidualLayer
from fairseq_ms.core.model import LanguageModel
from fairseq_ms.core.ops.attention import split_kv, split_qkv
from fairseq_ms.core.ops.linear import norm_linear, projection
from fairseq_ms.core.ops.recompute import Dropout, keep_in_graph, plain, records
from fairseq_ms.core.ops.relative_attention import Sinusoids, relative_attention
from fairseq_ms.core.stream_state import WHOLE, Memory, Mems, Pasts, SegmentCache, StreamState, join, shift


class RelativeAttention(nn.Module):
    """Multi-head attention from a segment to the memory and itself, with relative positions (Transformer-XL).

    u and v are biases of queries for scores by content and by distance, shared by all layers of a model. In pre-LN, the
    memory is normalised, too.
    """

    def __init__(self, config: StreamingConfig, u_NH: nn.Parameter, v_NH: nn.Parameter) -> None:
        super().__init__()
        dim, inner = config.dim, config.heads * config.width_of_head
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.recompute = config.recompute
        self.norm = config.norm_before()
        self.qkv = projection(dim, 3 * inner, bias=False, rows=3 * (inner,))
        self.position = nn.Linear(dim, inner, bias=False)
        self.out = projection(inner, dim, bias=False)
        self.u, self.v = u_NH, v_NH

    def project(self, positions_PD: Tensor) -> Tensor:
        """Project sinusoids of distances, (P, D) -> r (P, N, H)."""
        return self.position(positions_PD).unflatten(-1, (self.heads, -1))

    def of_memory(self, m_BMD: Tensor) -> Tensor:
        """Keys and values (2, B, N, M, H) of a memory."""
        project: Any = self.qkv
        if plain(self.qkv, nn.Linear):  # a memory needs no queries
            project = partial(F.linear, weight=self.qkv.weight[self.u.numel() :])
        kv, _ = norm_linear(m_BMD, self.norm, project, self.recompute)
        return split_kv(kv[..., -2 * self.u.numel() :], self.heads)

    def forward(self, s_BTD: Tensor, past: SegmentCache | None, m_BMD: Tensor, positions_PD: Tensor) -> Tensor:
        """Attend over memory and segment, (B, T, D) -> (B, T, D).

        Args:
            s_BTD: the segment, or the next piece of one
            past: for a piece, the KV cache of memory and segment so far, to which it is appended; memory and positions
                are then ignored
            m_BMD: the memory, which gets no gradient
            positions_PD: ``sinusoids`` of at least as many keys as there are
        """
        qkv, _ = norm_linear(s_BTD, self.norm, self.qkv, self.recompute)
        q, k, v = split_qkv(qkv, self.heads)
        if past is not None:
            (k, v), r_PNH, bias = past.append(split_kv(qkv[..., self.u.numel() :], self.heads)), past.r_PNH, past.bias
        else:
            r_PNH, bias = self.project(positions_PD[-(m_BMD.size(1) + s_BTD.size(1) + 1) :]), None
            # Joined with the heads first, as attention reads them: (N, B, M + T, H)
            pairs = zip(self.of_memory(m_BMD.detach()), (k, v))
            k, v = (torch.cat([x.transpose(0, 1) for x in pair], dim=2).transpose(0, 1) for pair in pairs)
        dropout = self.dropout if self.training else 0.0
        return self.out(relative_attention(q, k, v, r_PNH, self.u, self.v, dropout, bias, self.recompute))


class TransformerXLLayer(ResidualLayer):
    """Compute: attention over memory and segment, then feed-forward (Transformer-QL, Figure 2b, which is post-LN).

    ``name`` is that of its memory, ``depth`` how many layers its residual stream runs through.
    """

    attention: RelativeAttention

    def __init__(
        self, name: str, config: StreamingConfig, u_NH: nn.Parameter, v_NH: nn.Parameter, depth: int = 1
    ) -> None:
        super().__init__(config, RelativeAttention(config, u_NH, v_NH), depth)
        self.name = name


# Settings that have no effect on models with a memory, and the only value that each may have.
_WITHOUT: dict[str, Any] = {"positions": "learned", "qk_norm": False, "short_conv": 0, "sinks": False}
_WITHOUT |= {"kv_heads": None, "scale_embedding": False}


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(ModelConfig):
    """Sizes of every model with a memory.

    Attributes:
        segment_len: tokens of a segment
        mem_len: length of every layer's memory in states
        proj_init_std: initial standard deviation of the projections in adaptive input and softmax
    """

    activation: str = "relu"
    segment_len: int = 16
    mem_len: int = 16
    proj_init_std: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in _WITHOUT.items():
            if (got := getattr(self, name)) != default:
                raise ValueError(f"{name} must be left out, since a model with a memory has its own or none: got {got}")


class StreamingModel(LanguageModel[StreamState]):
    """A language model that reads streams segment by segment: ``model(tokens, state) -> (logits, state)``.

    A state continues its streams with gradients, too: a call then trains on its tokens after a detached memory.
    Without gradients, tokens are read through KV caches.

    A subclass builds its layers with ``make_layer``, ends its constructor with ``reset_parameters``, and implements
    ``forward_segment``, ``memory_lengths`` and ``memory_reach``.
    """

    config: StreamingConfig
    has_position_embedding = False
    # Whether ``remember`` returns a loss in training.
    has_auxiliary_loss = False

    def __init__(self, config: StreamingConfig) -> None:
        super().__init__(config)
        self.segment_len, self.mem_len = config.segment_len, config.mem_len
        # Keys of a whole segment: memory and segment, at every scale equally many.
        self.window = self.mem_len + self.segment_len
        # How many of a segment's first states move into a memory, by its name; all unless given.
        self.shifts: dict[str, int] = {}
        self.scale = math.sqrt(config.dim)
        self.drop = Dropout(config.dropout, config.recompute)
        self.table = Sinusoids(config.dim)
        # Shared by the attention of all layers.
        self.u = nn.Parameter(torch.empty(config.heads, config.width_of_head))
        self.v = nn.Parameter(torch.empty(config.heads, config.width_of_head))
        # After ``to_empty``, and after loading with ``assign``, each layer would have parameters of its own.
        self.register_load_state_dict_post_hook(_share)

    def make_layer(self, name: str, depth: int) -> TransformerXLLayer:
        """A Transformer-XL layer, one of ``depth``, with a memory of this name."""
        return TransformerXLLayer(name, self.config, self.u, self.v, depth)

    def reset_parameters(self) -> None:
        """Draw all weights anew; adaptive embeddings and softmax start as in Transformer-XL."""
        super().reset_parameters()
        for shared in (self.u, self.v):
            nn.init.normal_(shared, std=self.config.init_std)
        _share(self)
        for module in (self.embed.words, self.adaptive_softmax):
            for part in module.modules() if isinstance(module, AdaptiveInput | AdaptiveSoftmax) else ():
                if isinstance(part, nn.Embedding):
                    nn.init.normal_(part.weight, std=self.config.word_std)
                    if part.padding_idx is not None:
                        nn.init.zeros_(part.weight[part.padding_idx])
                elif isinstance(part, nn.Linear):
                    nn.init.normal_(part.weight, std=self.config.proj_init_std)

    @abstractmethod
    def forward_segment(
        self, x_BTD: Tensor, mems: Mems, positions: Tensor, pasts: Pasts = WHOLE
    ) -> tuple[Tensor, Mems]:
        """Run the model over a segment, as its paper lists it, or over the next piece of one.

        Args:
            x_BTD: the embedded segment, which may be unfinished, or a piece
            mems: the memories before the segment
            positions: ``sinusoids`` of the window
            pasts: for a piece, the KV caches of all layers; memories that no layer attends to then also have the
                states of the pieces before

        Returns:
            outputs (B, T, D), and the states of these T tokens that will move into each memory
        """

    def remember(self, moving: Mems, mems: Mems) -> tuple[Mems, Tensor | None]:
        """Move the states of a whole segment into the memories: the new memories, and in training a loss (B,) or None.

        Args:
            moving: the states, from ``forward_segment``
            mems: the memories before the segment
        """
        return {name: shift(s_BTD[:, : self.shifts.get(name)], mems[name]) for name, s_BTD in moving.items()}, None

    @abstractmethod
    def memory_lengths(self) -> dict[str, int]:
        """The length M of each memory, by name."""

    @abstractmethod
    def memory_reach(self) -> int:
        """How many earlier segments the outputs of a segment can depend on."""

    def idle_without_a_whole_segment(self) -> Iterable[nn.Parameter]:
        """Parameters that training on less than a segment may not use, but that still need a gradient."""
        return ()

    def sinusoids(self, like: Tensor) -> Tensor:
        """Sinusoids of the distances in a window, (window + 1, D), like ``like``, after dropout."""
        return self.drop(self.table(self.window, like))

    def new_memory(self, batch_size: int, device: torch.device | None = None) -> Memory:
        """The memory of B streams before their first tokens: zeros (Transformer-QL, Figures 2e and 3, line 3)."""
        self.check_batch_size(batch_size)
        like = self._like(device)
        shapes = {name: (batch_size, length, self.config.dim) for name, length in self.memory_lengths().items()}
        states = {name: like.new_zeros(shape) for name, shape in shapes.items()}
        return Memory(states, torch.zeros(batch_size, 0, dtype=torch.long, device=like.device))

    def stream(self, tokens_BT: Tensor, memory: Memory | None) -> tuple[Tensor, Memory, Tensor | None]:
        """Read tokens after a memory: features (B, T, D), the new memory, and the memory's loss (B,) or None."""
        memory = self.checked(memory, tokens_BT.size(0), tokens_BT.device)
        mems, known = memory.states, memory.pending_BT.size(1)
        tokens_BT = torch.cat([memory.pending_BT, tokens_BT], dim=1)
        whole = tokens_BT.size(1) - tokens_BT.size(1) % self.segment_len
        outputs, losses, counts = [], [], []
        segments = zip(*(x.split(self.segment_len, dim=1) for x in (tokens_BT, self.embed_tokens(tokens_BT))))
        for segment_BT, s_BTD in segments:
            y_BTD, moving = self.forward_segment(s_BTD, mems, self.sinusoids(s_BTD))
            outputs.append(y_BTD)
            if s_BTD.size(1) == self.segment_len:
                mems, loss_B = self.remember(moving, mems)
                if loss_B is not None:
                    # A segment that ends in padding is not whole, so that a row's loss is the same in any batch.
                    whole_B = segment_BT[:, -1].ne(-1 if self.config.padding_idx is None else self.config.padding_idx)
                    losses.append(loss_B.masked_fill(~whole_B, 0.0))
                    counts.append(whole_B)
        y_BTD = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        if not whole and self.training:
            y_BTD = keep_in_graph(y_BTD, self.idle_without_a_whole_segment())
        if self.training and self.has_auxiliary_loss and not losses:
            # Processes add up logged values by their place in a list, so that every batch must have this one.
            losses, counts = [y_BTD.new_zeros(y_BTD.size(0))], [y_BTD.new_ones(y_BTD.size(0))]
        loss_B = torch.stack(losses).sum(dim=0) / torch.stack(counts).sum(dim=0).clamp(min=1) if losses else None
        return self.drop(y_BTD[:, known:]), Memory(mems, tokens_BT[:, whole:]), loss_B

    @torch.no_grad()
    def advance(self, tokens_BT: Tensor, state: StreamState) -> Tensor:
        """Continue the streams of a state without gradients: tokens (B, T) -> outputs (B, T, D)."""
        count, outputs = tokens_BT.size(1), []
        tokens_BT = state.take(tokens_BT)
        while tokens_BT.size(1):
            left = self.segment_len - state.done
            x_BTD, tokens_BT = self.embed_tokens(tokens_BT[:, :left]), tokens_BT[:, left:]
            if x_BTD.size(1) == self.segment_len:
                y_BTD, moving = self.forward_segment(x_BTD, state.mems, self.sinusoids(x_BTD))
                state.mems, _ = self.remember(moving, state.mems)
            else:
                y_BTD = self._piece(x_BTD, state)
            outputs.append(y_BTD)
        y_BTD = torch.cat(outputs, dim=1)
        return y_BTD[:, y_BTD.size(1) - count :]

    def _piece(self, x_BTD: Tensor, state: StreamState) -> Tensor:
        """Run the next piece of a segment through the state's KV caches, (B, T, D) -> outputs (B, T, D)."""
        if not state.done:
            state.caches = self.segment_caches(x_BTD)
            state.before, state.moving = state.mems, {}
            for layer in self.memory_layers():
                state.caches[layer.name].begin(layer.attention.of_memory(state.mems[layer.name]))
        y_BTD, moving = self.forward_segment(x_BTD, state.before, self.sinusoids(x_BTD), state.caches)
        state.moving = join(state.moving, moving)
        unread = {name: x for name, x in moving.items() if name not in state.caches}
        state.before = state.before | join(state.before, unread)
        state.done += x_BTD.size(1)
        if state.done == self.segment_len:
            state.mems, _ = self.remember(state.moving, state.mems)
            state.done = 0
        return y_BTD

    def embed_tokens(self, tokens_BT: Tensor) -> Tensor:
        """Embed tokens, (B, T) -> (B, T, D) (Transformer-QL, Figure 2e, line 6)."""
        return self.embed(tokens_BT) * self.scale

    def forward(self, tokens_BT: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """As ``CausalModel.forward``, but a state does not prevent gradients.

        They reach back to the beginning of the current segment, also if an earlier call began it, and no further.
        """
        tokens_BT = self.checked_tokens(tokens_BT)
        state = state if state is not None else self.new_state(tokens_BT.size(0), device=tokens_BT.device)
        return self.logits(self.features(tokens_BT, state)), state

    def features(self, tokens_BT: Tensor, state: StreamState | None = None) -> Tensor:
        return self._read(tokens_BT, state)[0]

    def loss(
        self, tokens_BT: Tensor, targets_BT: Tensor, ignore_index: int = -100, state: StreamState | None = None
    ) -> Tensor:
        """As ``CausalModel.loss``, but a state does not prevent gradients; in training, plus the memory's loss."""
        tokens_BT, targets_BT = self.checked_tokens(tokens_BT), self.checked_targets(targets_BT, tokens_BT)
        x_BTD, auxiliary_B = self._read(tokens_BT, state)
        loss, count_B = self.loss_of(x_BTD, targets_BT, ignore_index), (targets_BT != ignore_index).sum(dim=1)
        return loss if auxiliary_B is None else loss + (auxiliary_B * count_B).sum() / count_B.sum().clamp(min=1)

    def new_state(
        self, batch_size: int, capacity: int = 0, device: torch.device | None = None, memory: Memory | None = None
    ) -> StreamState:
        """A state of B new streams, or of those of a memory; ``capacity`` is ignored, since windows are fixed."""
        return StreamState(self.config, self.checked(memory, batch_size, device))

    def segment_caches(self, x_BTD: Tensor) -> dict[str, SegmentCache]:
        """An empty KV cache for each layer, by the name of its memory, for B streams of embedded tokens."""
        positions_PD, layers = self.sinusoids(x_BTD), self.memory_layers()
        return {layer.name: SegmentCache(x_BTD.size(0), layer.attention.project(positions_PD)) for layer in layers}

    def memory_layers(self) -> list[TransformerXLLayer]:
        """All layers with a memory."""
        return [layer for layer in self.modules() if isinstance(layer, TransformerXLLayer)]

    def checked(self, memory: object, batch_size: int, device: torch.device | None = None) -> Memory:
        """The memory on a device, or a new one for None; raises ValueError for one of another model or batch size."""
        if memory is None:
            return self.new_memory(batch_size, device)
        if not isinstance(memory, Memory):
            raise ValueError(f"memory: must be None or the memory that a call before has left, got {type(memory)}")
        found = {name: tuple(state.shape) for name, state in memory.states.items()}
        wanted = {name: (batch_size, length, self.config.dim) for name, length in self.memory_lengths().items()}
        if found != wanted or memory.batch_size != batch_size:
            raise ValueError(f"memory: must hold states (B, M, D) of {wanted}, got {found}")
        return memory.to(self._like(device))

    def _like(self, device: torch.device | None) -> Tensor:
        """An empty tensor of the weights' type, on a device or on theirs."""
        return torch.empty(0, dtype=self.u.dtype, device=device or self.u.device)

    def _read(self, tokens_BT: Tensor, state: StreamState | None) -> tuple[Tensor, Tensor | None]:
        """Continue a state or begin new streams: features (B, T, D), and the memory's loss (B,) or None."""
        if state is not None:
            self.check_state(state, tokens_BT)
        if state is not None and not records():
            return self.drop(self.advance(tokens_BT, state)), None
        x_BTD, memory, loss_B = self.stream(tokens_BT, state.memory if state is not None else None)
        if state is not None:
            state.restart(memory, state.length + tokens_BT.size(1))
        return x_BTD, loss_B


def _share(model: StreamingModel, *_: object) -> None:
    """Give all layers the u and v of the model."""
    for layer in model.memory_layers():
        layer.attention.u, layer.attention.v = model.u, model.v
