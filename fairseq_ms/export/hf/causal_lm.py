"""A model of fairseq_ms as `transformers` wants a causal language model.

The models want padding after the tokens, and states whose rows are equally long; `transformers` pads before them,
and its rows are not. So a pass without cache moves every row to the left and its outputs back, and a pass with cache
keeps a state for every number of tokens that rows have had.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from fairseq_ms.core.layers import ResidualLayer
from fairseq_ms.core.steps.generation import generate  # noqa: F401 (the models' own)
from fairseq_ms.core.steps.replay import Reader


@dataclass
class Group:
    """Rows of a batch whose sequences are equally long, and what the model remembers of them.

    Attributes:
        rows_R: which rows of the batch
        read: what reads on, with a state of R sequences; None before their first tokens
    """

    rows_R: Tensor
    read: Reader | None


@dataclass
class GroupedCache:
    """A state for every length among the rows of a batch, so that a row computes what it would compute alone.

    It has what ``transformers`` asks of a cache. ``read_BT`` is True at tokens and False at padding, in the columns of
    the batch that have been read.
    """

    groups: list[Group]
    read_BT: Tensor

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many columns of the batch have been read."""
        return self.read_BT.size(1)

    def split(self, counts_B: Tensor) -> list[int]:
        """Give rows with different counts different groups; the count of every group."""
        groups, counts = [], []
        for group in self.groups:
            counts_R = counts_B[group.rows_R]
            for count in counts_R.unique().tolist():
                place_R = (counts_R == count).nonzero().squeeze(1)
                read = group.read
                if read is not None and place_R.numel() < counts_R.numel():
                    read = read.copy()
                    read.reorder(place_R)
                groups.append(Group(group.rows_R[place_R], read))
                counts.append(count)
        self.groups = groups
        return counts

    def reorder_cache(self, beam_idx: Tensor) -> GroupedCache:
        """Row i becomes what row ``beam_idx[i]`` was; rows may be repeated and dropped."""
        groups = []
        for group in self.groups:
            # Where in the batch a row of this group goes, and which row of the group that is.
            taken = beam_idx.unsqueeze(1) == group.rows_R.to(beam_idx.device)
            rows_R, place_R = taken.nonzero().unbind(1)
            if rows_R.numel():
                if group.read is not None:
                    group.read.reorder(place_R)
                groups.append(Group(rows_R, group.read))
        self.groups = groups
        self.read_BT = self.read_BT[beam_idx.to(self.read_BT.device)]
        return self

    def crop(self, max_length: int) -> None:
        raise ValueError("assisted generation needs to go back in a cache, which most models of fairseq_ms cannot")


class FairseqMsConfig(PretrainedConfig):
    """The sizes of an exported model, and what `transformers` wants to know.

    Args:
        arch: the architecture, as fairseq's ``--arch`` names it
        model: the configuration of the core's model, by the names of its fields
        flags: the flags that it was trained with, by name, with underscores
        tied: every further name of a parameter that has several, and its first
        vocab_size: number of symbols, fairseq's four special ones included
        max_position_embeddings: the longest input in tokens, the first symbol included; None where there is no limit
        begin_token_id: what the model reads in place of ``bos_token_id``, which stands in no text; None for that itself
    """

    model_type = "fairseq_ms"

    def __init__(
        self,
        arch: str = "",
        model: dict[str, Any] | None = None,
        flags: dict[str, Any] | None = None,
        tied: dict[str, str] | None = None,
        vocab_size: int = 4,
        max_position_embeddings: int | None = None,
        begin_token_id: int | None = None,
        **settings: Any,
    ) -> None:
        self.arch = arch
        self.model = model or {}
        self.flags = flags or {}
        self.tied = tied or {}
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.begin_token_id = begin_token_id
        super().__init__(**settings)


class FairseqMsForCausalLM(PreTrainedModel, GenerationMixin):
    """A model of the core, which a subclass names with its configuration."""

    config_class = FairseqMsConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    core_class: ClassVar[Any]
    core_config: ClassVar[Any]

    def __init__(self, config: FairseqMsConfig) -> None:
        super().__init__(config)
        self.decoder = self.core_class(self.core_config.from_dict(config.model))
        # Their identity is lost while a model is built and loaded.
        self._tied_weights_keys = config.tied
        self._keys_to_ignore_on_load_missing = [re.escape(name) for name in self._tied_weights_keys]
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # The first pass makes the cache.
        return False

    def get_input_embeddings(self) -> nn.Module:
        embed = getattr(self.decoder, "embed", None)
        return embed.words if embed is not None else self.decoder.encoder.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        if value is not self.get_input_embeddings():
            raise ValueError("an exported model keeps its embedding: resize_token_embeddings changes its symbols")

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As transformers has it; ValueError, before anything has changed, for symbols in bands or of chunks."""
        words, project = self.get_input_embeddings(), self.decoder.project
        project = getattr(project, "project", project)
        if not isinstance(words, nn.Embedding) or project is None or not hasattr(self.decoder, "embed"):
            kind = f"{type(self.decoder).__name__} with {type(words).__name__} and {type(project).__name__}"
            raise ValueError(f"the vocabulary of a model with bands or chunks of symbols cannot be changed: got {kind}")
        words = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        count = words.num_embeddings
        if isinstance(project, nn.Linear):
            grown = self._get_resized_lm_head(project, count, mean_resizing=mean_resizing)
            project.weight.data, project.out_features = grown.weight.data, count
            project.rows = (count,)  # type: ignore[assignment]
        else:
            project.symbols = count
        self.config.model = {**self.config.model, "vocab_size": count, "output_vocab_size": count}
        self.decoder.config = self.core_config.from_dict(self.config.model)
        return words

    def _set_gradient_checkpointing(self, enable: bool = True, **functions: Any) -> None:
        """The core's own ``checkpoint``, which is never reentrant."""
        layers = [module for module in self.modules() if isinstance(module, ResidualLayer)]
        if not layers:
            raise ValueError(f"gradient checkpointing needs a transformer: {type(self.decoder).__name__} has none")
        every = functions.get("every_n_layers", 1)
        for index, layer in enumerate(layers):
            layer.checkpoint = enable and index % every == 0
        self.gradient_checkpointing = enable

    def get_output_embeddings(self) -> None:
        """None, so that nothing ties what the decoder has tied or left untied itself."""
        return None

    def tie_weights(self, missing_keys: set[str] | None = None, **unused: Any) -> None:
        """Give parameters that are one in the decoder the weight that has been loaded under the first of their names.

        Other models of transformers tie an output to the input embedding here.
        """
        for target, source in self._tied_weights_keys.items():
            path, _, name = target.rpartition(".")
            setattr(self.get_submodule(path), name, self.get_parameter(source))
            if missing_keys is not None:
                missing_keys.discard(target)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: GroupedCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits (B, T, V) of tokens (B, T); log-probabilities for a model with adaptive softmax.

        Args:
            attention_mask: (B, T) with the columns of the cache in front, as they were; 0 at padding, which lies
                before or after a row's tokens of this call
            past_key_values: what a call before returned with ``use_cache``; the tokens continue it
            labels: (B, T); gives the mean loss of predicting each from what is before it, -100 left out, and so is what
                follows a column of padding
            use_cache: return a cache
            logits_to_keep: only the last so many positions, or those of a tensor of indices; 0 for all

        Raises ValueError for other arguments, for ``position_ids`` other than those of the mask, which a model counts
        by itself, and for a cache of another kind.
        """
        positions_BT = others.pop("position_ids", None)
        refused = [name for name, value in others.items() if value is not None and value is not False]
        refused = [name for name in refused if name != "num_items_in_batch"]
        if refused:
            raise ValueError(f"a model of fairseq_ms has no {refused[0]}: leave it out")
        if self.config.begin_token_id is not None:
            input_ids = input_ids.masked_fill(input_ids == self.config.bos_token_id, self.config.begin_token_id)
        if self.config.model.get("sinks") and any(weight.is_meta for weight in self.parameters()):
            raise ValueError(
                "a model with sinks reads weights of modules that it does not call: load it without offload"
            )
        cache = past_key_values
        if not isinstance(cache, GroupedCache | None):
            wanted = "past_key_values must be what this model has returned before"
            raise ValueError(f"{wanted}, since it keeps no keys and values of a prefix: got {type(cache).__name__}")
        if cache is None and use_cache:
            rows_B = torch.arange(input_ids.size(0), device=input_ids.device)
            cache = GroupedCache([Group(rows_B, None)], input_ids[:, :0].bool())
        if positions_BT is not None:
            check_positions(positions_BT, input_ids, attention_mask, cache)
        read = self._at_once if cache is None else partial(self._continued, cache)
        x_BTD = read(input_ids, attention_mask)
        kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        logits = self.decoder.logits(x_BTD[:, kept])
        loss = None
        if labels is not None:
            if attention_mask is not None:
                before_BT = nn.functional.pad(attention_mask[:, -labels.size(1) : -1], (1, 0), value=1)
                labels = labels.masked_fill(before_BT == 0, -100)
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=others.get("num_items_in_batch"),
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if use_cache else None)
        return output.to_tuple() if return_dict is False else output

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: GroupedCache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """The arguments of ``forward`` at a step of ``generate()``: the tokens that the cache has not read.

        ValueError where a row has nothing to be continued in its last column.
        """
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        is_prompt = input_ids.size(1) - seen > 1
        if is_prompt and attention_mask is not None and not bool(attention_mask[:, -1].all()):
            raise ValueError("a batch of prompts must be padded on the left: set padding_side='left'")
        kept = {"past_key_values": past_key_values, "attention_mask": attention_mask, "use_cache": use_cache}
        # For ``forward`` to refuse.
        kept |= {name: others.get(name) for name in ("output_hidden_states", "output_attentions")}
        # transformers 4.57 has only those of the prompt at later steps.
        if position_ids is not None and position_ids.size(-1) == input_ids.size(1):
            kept["position_ids"] = position_ids[..., seen:]
        return {"input_ids": input_ids[:, seen:], "logits_to_keep": logits_to_keep, **kept}

    def _at_once(self, tokens_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Features (B, T, D) of whole sequences."""
        if mask_BT is None or bool(mask_BT.all()):
            self.decoder.check_length(tokens_BT.size(1))
            return self.decoder.features(tokens_BT)
        starts_B, lengths_B = spans(mask_BT)
        columns, longest = tokens_BT.size(1), int(lengths_B.max())
        self.decoder.check_length(longest)
        column_T = torch.arange(columns, device=tokens_BT.device)
        moved_BT = tokens_BT.gather(1, (column_T + starts_B.unsqueeze(1)) % columns)
        moved_BT = moved_BT.masked_fill(column_T >= lengths_B.unsqueeze(1), self.config.pad_token_id)
        x_BTD = self.decoder.features(moved_BT[:, :longest])
        # What is at padding means nothing.
        back_BT = ((column_T - starts_B.unsqueeze(1)) % columns).clamp(max=longest - 1)
        return x_BTD.gather(1, back_BT.unsqueeze(-1).expand(-1, -1, x_BTD.size(-1)))

    def _continued(self, cache: GroupedCache, tokens_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Features (B, T, D) of tokens after those that the cache has read, which reads them too; 0 at padding."""
        columns, seen = tokens_BT.size(1), cache.get_seq_length()
        plain_BT = torch.cat([cache.read_BT, torch.ones_like(tokens_BT, dtype=torch.bool)], dim=1)
        mask_BT = plain_BT if mask_BT is None else mask_BT.bool()
        starts_B, counts = tokens_BT.new_zeros(tokens_BT.size(0)), [columns] * len(cache.groups)
        if mask_BT.shape != plain_BT.shape:
            wanted = f"the {seen} columns of the cache in front of {columns} new ones"
            raise ValueError(f"attention_mask must have {wanted}: got the shape {tuple(mask_BT.shape)}")
        if not mask_BT.equal(plain_BT):
            if not mask_BT[:, :seen].equal(cache.read_BT):
                raise ValueError("attention_mask must not change where the cache has read tokens: begin without it")
            starts_B, counts_B = spans(mask_BT[:, seen:])
            counts = cache.split(counts_B)
        for group, count in zip(cache.groups, counts):
            self.decoder.check_length(count if group.read is None else group.read.length + count)
        parts = []
        for group, count in zip(cache.groups, counts):
            if count and group.read is None:
                state = self.decoder.new_state(group.rows_R.numel(), 2 * count, tokens_BT.device)
                group.read = Reader(self.decoder, state)
            if count and group.read is not None:
                column_RT = starts_B[group.rows_R].unsqueeze(1) + torch.arange(count, device=tokens_BT.device)
                place = (group.rows_R.unsqueeze(1), column_RT)
                parts.append((place, group.read(tokens_BT[place])))
        x_BTD = parts[0][1].new_zeros(*tokens_BT.shape, parts[0][1].size(-1))
        for place, x_RTD in parts:
            x_BTD[place] = x_RTD
        cache.read_BT = mask_BT
        return x_BTD


def check_positions(
    positions_BT: Tensor, tokens_BT: Tensor, mask_BT: Tensor | None, cache: GroupedCache | None
) -> None:
    """ValueError unless the positions of a call's tokens are how many tokens of the mask are before each."""
    if mask_BT is None:
        mask_BT = torch.ones_like(tokens_BT)
        mask_BT = mask_BT if cache is None else torch.cat([cache.read_BT, mask_BT], dim=1)
    new = tokens_BT.size(1)
    own_BT, seen_BT = (mask_BT.long().cumsum(1) - 1)[:, -new:], mask_BT[:, -new:].bool()
    if positions_BT.size(-1) != own_BT.size(1) or bool(((positions_BT != own_BT) & seen_BT).any()):
        wanted = "position_ids must count the tokens of attention_mask in every row, from 0"
        raise ValueError(f"{wanted}: documents in one row would see each other, so give each a row, and leave it out")


def spans(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Where the ones of every row begin and how many they are; ValueError unless they are one run, and some."""
    lengths_B = mask_BT.long().sum(1)
    starts_B = mask_BT.long().argmax(1)
    column_T = torch.arange(mask_BT.size(1), device=mask_BT.device)
    inside_BT = (column_T >= starts_B.unsqueeze(1)) & (column_T < (starts_B + lengths_B).unsqueeze(1))
    if not bool((inside_BT == mask_BT.bool()).all()) or not bool(lengths_B.any()):
        raise ValueError("attention_mask must hide padding before or after a row's tokens, and not between them")
    return starts_B, lengths_B
