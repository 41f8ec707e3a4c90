"""What a model remembers of a batch between the steps of ``generate()``, where prompts may differ in length."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fairseq_ms.core.cache import State


@dataclass
class Group:
    """The rows of a batch whose sequences are equally long, and what the model remembers of them.

    Attributes:
        rows_R: which rows of the batch
        padding: how many columns of padding come before their tokens
        state: a state of R sequences
    """

    rows_R: Tensor
    padding: int
    state: State


@dataclass
class GroupedCache:
    """A state for every length among the rows of a batch, so that a row computes what it would compute alone.

    It has what ``transformers`` asks of a cache. ``length`` counts columns of the batch, padding included.
    """

    groups: list[Group]
    length: int = 0

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many columns of the batch have been read."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> GroupedCache:
        """Row i becomes what row ``beam_idx[i]`` was; rows may be repeated and dropped."""
        groups = []
        for group in self.groups:
            # Where in the batch a row of this group goes, and which row of the group that is.
            taken = beam_idx.unsqueeze(1) == group.rows_R.to(beam_idx.device)
            rows_R, place_R = taken.nonzero().unbind(1)
            if rows_R.numel():
                group.state.reorder(place_R)
                groups.append(Group(rows_R, group.padding, group.state))
        self.groups = groups
        return self

    def crop(self, max_length: int) -> None:
        raise ValueError("assisted generation needs to go back in a cache, which most models of fairseq_ms cannot")
