"""The base classes of all models: features, logits, loss, and generation of text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.adaptive import AdaptiveInput, AdaptiveSoftmax
from fairseq_ms.core.cache import State, Unread
from fairseq_ms.core.config import ModelConfig
from fairseq_ms.core.layers import ResidualLayer, TokenEmbedding, compile_layers
from fairseq_ms.core.ops.linear import SomeSymbols, TiedOutput, projection
from fairseq_ms.core.ops.linear_cross_entropy import cross_entropy_of

Prompts = TypeVar("Prompts", Tensor, list[Tensor])
S = TypeVar("S", bound=State)


class CausalModel(nn.Module, ABC, Generic[S]):
    """A causal language model with states of a class S: ``model(tokens, state) -> (logits, state)``.

    A subclass implements ``features`` and ``new_state`` and sets the attributes.

    Attributes:
        config: sizes, among them ``max_positions``
        project: maps features to logits; None with an adaptive softmax
        adaptive_softmax: maps features to log-probabilities, or None
        steps: the CUDA graphs of the last generation, which the next one may use again; set it to None to free them
    """

    steps: Any = None
    # ``core.steps.generation.generate``, which sets itself here, since its module imports this one.
    generation: ClassVar[Callable[..., Any]]
    config: Any
    project: nn.Module | None
    adaptive_softmax: AdaptiveSoftmax | None

    @abstractmethod
    def features(self, tokens_BT: Tensor, state: S | None = None) -> Tensor:
        """The model without its output layer, as its paper lists it: tokens (B, T) -> features (B, T, D).

        With a state, the tokens continue its texts, and the state moves on.
        """

    @abstractmethod
    def new_state(self, batch_size: int, capacity: int = 0, device: torch.device | None = None) -> S:
        """An empty state of B texts, with room for about ``capacity`` tokens each (it grows if there are more).

        It is on ``device``, by default that of the weights; where these are offloaded, give that of the tokens.
        """

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layers as ``loss`` and ``forward`` run them without a state; see ``layers.compile_layers``."""
        compile_layers(self, *args, **kwargs)

    @abstractmethod
    def max_length(self) -> int | None:
        """The longest text that the model can read, in tokens; None for no limit."""

    def forward(self, tokens_BT: Tensor, state: S | None = None) -> tuple[Tensor, S]:
        """Tokens (B, T) -> logits (B, T, V) for the token after each of them, and a state that continues the texts.

        Without a state, the tokens begin new texts and there are gradients; the returned state reads the tokens again
        when it is first used. With a state, the tokens continue its texts without gradients, and the state moves on
        and is returned. Raises ValueError for tokens that are not integers (B, T), for a state of another batch size or
        configuration, and for a text longer than ``max_length``.
        """
        tokens_BT = self.checked_tokens(tokens_BT)
        if state is None:
            self.check_length(tokens_BT.size(1))
            unread: Any = Unread(self.config, tokens_BT.clone())
            return self.logits(self.features(tokens_BT)), unread
        with torch.no_grad():
            return self.logits(self._continued(tokens_BT, state)), state

    def _continued(self, tokens_BT: Tensor, state: S) -> Tensor:
        """Check a state, and continue its texts: tokens (B, T) -> features (B, T, D)."""
        self.check_state(state, tokens_BT)
        self.check_length(state.length + tokens_BT.size(1))
        return self.features(tokens_BT, self.settled(state))

    def settled(self, state: S) -> S:
        """The state, or for an ``Unread`` one a state that has read its tokens."""
        unread: Any = state
        if not isinstance(unread, Unread):
            return state
        if unread.known is None:
            # With room to go on for as long again.
            known = self.new_state(unread.batch_size, 2 * unread.length, unread.tokens_BT.device)
            self.features(unread.tokens_BT, known)
            unread.known = known
        return cast(S, unread.known)

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Features (B, T, D) -> logits (B, T, V), or log-probabilities with an adaptive softmax."""
        if self.adaptive_softmax is not None:
            return self.adaptive_softmax.log_probs(x_BTD)
        assert self.project is not None
        return self.project(x_BTD)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, ignore_index: int = -100, state: S | None = None) -> Tensor:
        """Mean of -log p(target) in nats over the targets (B, T) that are not ``ignore_index``.

        Equals ``F.cross_entropy`` of ``forward``'s logits, of which it computes only a few rows at a time. With a state
        there are no gradients. Raises ValueError where ``forward`` does, and for targets of another shape than tokens.
        """
        tokens_BT, targets_BT = self.checked_tokens(tokens_BT), self.checked_targets(targets_BT, tokens_BT)
        if state is None:
            self.check_length(tokens_BT.size(1))
            return self.loss_of(self.features(tokens_BT), targets_BT, ignore_index)
        with torch.no_grad():
            return self.loss_of(self._continued(tokens_BT, state), targets_BT, ignore_index)

    def loss_of(self, x_BTD: Tensor, targets_BT: Tensor, ignore_index: int = -100) -> Tensor:
        """``loss`` of features (B, T, D)."""
        x_QD, target_Q = x_BTD.flatten(0, 1), targets_BT.flatten()
        kept_Q = target_Q != ignore_index
        count = kept_Q.sum().clamp(min=1)
        if self.adaptive_softmax is None:
            assert self.project is not None
            return cross_entropy_of(x_QD, self.project, target_Q, ignore_index) / count
        parts = zip(*self.adaptive_softmax(x_QD[kept_Q], target_Q[kept_Q]))
        losses = [F.cross_entropy(logits, target, reduction="sum") for logits, target in parts if logits is not None]
        return torch.stack(losses).sum() / count

    def generate(
        self,
        prompt: Prompts,
        n: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        state: S | None = None,
        generator: torch.Generator | None = None,
        graphs: bool | None = None,
        eos_idx: int | None = None,
        allowed: Tensor | None = None,
        stop: Callable[[Tensor], bool] | None = None,
    ) -> Prompts:
        """Continue prompts by n tokens: (B, P) -> (B, P + n), (P,) -> (P + n,), a list of (P,) -> a list of (P + n,).

        In evaluation mode. Prompts in a list may have different lengths, without padding: the prefill reads as many
        tokens as the shortest has, and tokens of longer ones then replace what is drawn.

        Args:
            prompt: at least one token a row, or a list of rows
            n: tokens to draw for each row, fewer where ``eos_idx`` or ``stop`` ends generation
            temperature: divides the logits; below 1e-6, the most probable token is taken
            top_k: draw among the k most probable tokens; 0 for all
            top_p: draw among the most probable tokens whose probabilities add up to this
            state: the text before the prompt, which is no list then; it reads all tokens but the last one drawn
            generator: source of random numbers, by default torch's
            graphs: decode by CUDA graphs (True), without (False), or wherever possible (None)
            eos_idx: a symbol that ends a text and fills the rest of its row; generation stops when all texts have ended
            allowed: (V,), True for symbols that may be drawn; by default all
            stop: called with each column of tokens (B, 1) after the shortest prompt; True stops generation

        Raises ValueError for a prompt without tokens, for numbers outside their ranges, a state of another batch size
        or configuration, a text that would be longer than ``max_length``, ``graphs`` where there can be none, an
        ``eos_idx`` that is no symbol, an ``allowed`` of another shape or of no symbols, and, at the end, for logits
        that were not finite.
        """
        settings = temperature, top_k, top_p, state, generator, graphs, eos_idx, allowed, stop
        return CausalModel.generation(self, prompt, n, *settings)

    def checked_tokens(self, tokens_BT: Tensor) -> Tensor:
        """Tokens (B, T) as int64. Raises ValueError unless they are integers, and at least one."""
        if tokens_BT.dim() != 2 or not tokens_BT.numel():
            raise ValueError(f"tokens must be (B, T) with at least one token: got shape {tuple(tokens_BT.shape)}")
        return self._integers("tokens", tokens_BT)

    def checked_targets(self, targets_BT: Tensor, tokens_BT: Tensor) -> Tensor:
        """Targets as int64. Raises ValueError unless they are integers and have the tokens' shape."""
        if targets_BT.shape != tokens_BT.shape:
            raise ValueError(f"targets must have the shape of tokens {(*tokens_BT.shape,)}: got {(*targets_BT.shape,)}")
        return self._integers("targets", targets_BT)

    @staticmethod
    def _integers(name: str, x: Tensor) -> Tensor:
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise ValueError(f"{name} must be integers: got {x.dtype}")
        return x.long()

    def check_state(self, state: State, tokens_BT: Tensor) -> None:
        """Raise ValueError for what is no state, and for a state of another configuration or batch size."""
        if not isinstance(state, State):
            got = type(state).__name__
            raise ValueError(f"state must be what new_state or a call before has returned: got {got}")
        if state.config != self.config:
            other = type(state.config).__name__
            raise ValueError(f"state must be of a model with this configuration: got one of a different {other}")
        state.check_rows(tokens_BT)

    @staticmethod
    def check_batch_size(batch_size: int) -> None:
        """Raise ValueError for a number of texts below zero."""
        if batch_size < 0:
            raise ValueError(f"batch_size must be at least 0: got {batch_size}")

    def check_length(self, length: int) -> None:
        """Raise ValueError for a text longer than ``max_length``."""
        most = self.max_length()
        if most is not None and length > most:
            limit = f'at most max_positions {most} tokens (positions="rotary" has no limit)'
            raise ValueError(f"a text must have {limit}: got {length}")


class Loss(nn.Module):
    """A model's ``loss`` as the forward pass of a module, for wrappers that only call that.

    ``DistributedDataParallel(Loss(model))(tokens, targets)`` averages gradients over processes, which
    ``ddp.module.loss`` does not.
    """

    def __init__(self, model: CausalModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, ignore_index: int = -100, state: Any = None) -> Tensor:
        """``CausalModel.loss``."""
        return self.model.loss(tokens_BT, targets_BT, ignore_index, state)


class LanguageModel(CausalModel[S]):
    """A causal model of embedded tokens: subclasses build their layers on ``self.embed``."""

    has_position_embedding = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        symbols, padding, predicted = config.vocab_size, config.padding_idx, config.output_vocab_size
        words: Any
        if config.adaptive_input is None:
            words = nn.Embedding(symbols, config.dim, padding)
        else:
            words = AdaptiveInput(symbols, padding, config.dim, config.adaptive_input)
        self.embed = TokenEmbedding(config, words, self.max_length())
        self.adaptive_softmax, self.project = None, None
        if (bands := config.adaptive_softmax) is not None:
            tied = words if config.tie_adaptive_weights else None
            options = config.tie_adaptive_projections, config.project_adaptive_head
            self.adaptive_softmax = AdaptiveSoftmax(predicted or symbols, config.dim, bands, tied, *options)
        elif config.tie_embeddings:
            self.project = TiedOutput(self.embed)
        else:
            self.project = projection(config.dim, predicted or symbols, bias=False)
        if config.unpredicted and self.project is not None:
            self.project = SomeSymbols(self.project, config.unpredicted)

    def reset_parameters(self) -> None:
        """Draw all weights anew; the last line of a subclass's constructor."""
        initialise(self, self.config.init_std, self.config.word_std)
        start_residuals(self)

    def max_length(self) -> int | None:
        return self.config.max_positions if self.has_position_embedding and self.config.positions == "learned" else None

    def room(self, capacity: int) -> int:
        """Tokens to allocate a state for: ``capacity``, but no more than ``max_length``."""
        most = self.max_length()
        return capacity if most is None else min(capacity, most)


def initialise(module: nn.Module, std: float, embedding_std: float) -> None:
    """Draw the weights of projections and embeddings from normal distributions; biases and padding are zero.

    Other modules are reset by their ``reset_parameters``, if they have one.
    """
    for child in module.children():
        initialise(child, std, embedding_std)
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=embedding_std)
        if module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])
    # A model's own calls this function.
    elif not isinstance(module, LanguageModel) and (own := getattr(module, "reset_parameters", None)):
        own()


@torch.no_grad()
def start_residuals(module: nn.Module) -> None:
    """Scale the initial projections into residual streams (``init_residual``)."""
    for layer in module.modules():
        if isinstance(layer, ResidualLayer) and layer.residual_start != 1.0:
            for last in (layer.attention.out, layer.ffn.down):
                last.weight.mul_(layer.residual_start)
