"""What a model remembers of a batch between the steps of ``generate()``, where prompts may differ in length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_ms.core.cache import State


class Group:
    """The rows of a batch whose sequences are equally long, and what the model remembers of them.

    Attributes:
        rows_R: which rows of the batch
        state: a state of R sequences
    """

    def __init__(self, rows_R: Tensor, state: State) -> None:
        self.rows_R = rows_R
        self.state = state


class GroupedCache:
    """A state for every length among the rows of a batch: a row computes what it would compute alone.

    It has what ``transformers`` asks of a cache. ``length`` counts columns of the batch, padding included.
    """

    is_compileable = False

    def __init__(self, groups: list[Group], length: int) -> None:
        self.groups = groups
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many columns of the batch have been read."""
        return self.length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit, as ``transformers`` spells it."""
        return -1

    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(group.state.length for group in self.groups)

    def reorder_cache(self, beam_idx: Tensor) -> GroupedCache:
        """Row i becomes what row ``beam_idx[i]`` was; rows may be repeated and dropped."""
        groups = []
        for group in self.groups:
            # Where in the batch a row of this group goes, and which row of the group that is.
            taken = beam_idx.unsqueeze(1) == group.rows_R.to(beam_idx.device)
            rows_R, place_R = taken.nonzero().unbind(1)
            if rows_R.numel():
                group.state.reorder(place_R)
                groups.append(Group(rows_R, group.state))
        self.groups = groups
        return self

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times."""
        total = sum(group.rows_R.numel() for group in self.groups)
        self.reorder_cache(torch.arange(total, device=self.groups[0].rows_R.device).repeat_interleave(repeats))

    def reset(self) -> None:
        raise ValueError("a cache of fairseq_ms cannot be emptied: leave past_key_values out to begin anew")

    def crop(self, max_length: int) -> Any:
        raise ValueError("assisted generation needs to go back in a cache, which most models of fairseq_ms cannot")
