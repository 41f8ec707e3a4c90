"""``language_modeling_random_offsets``: fairseq's ``language_modeling`` on blocks that move from epoch to epoch."""

from __future__ import annotations

from typing import Any

from fairseq.data import iterators
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from fairseq_ms.data.random_offsets import at_random_offset
from fairseq_ms.errors import UsageError


@register_task("language_modeling_random_offsets", dataclass=LanguageModelingConfig)
class RandomOffsetsTask(LanguageModelingTask):
    """Train on every token once an epoch, in blocks whose boundaries are drawn anew for every epoch.

    The seed and the epoch decide where they lie, so a resumed run has the same. Evaluation is fairseq's.
    """

    def get_batch_iterator(self, dataset: Any, *args: Any, **settings: Any) -> iterators.EpochBatchIterator:
        """As fairseq's; in training, one that lives for its epoch, since the next one has other blocks.

        Raises UsageError on training blocks that end where lines do.
        """
        # fairseq says how to shuffle in training and nowhere else.
        if settings.get("grouped_shuffling") is None:
            settings.pop("grouped_shuffling", None)
            return super().get_batch_iterator(dataset, *args, **settings)
        mode = str(self.args.sample_break_mode or "none")
        if mode != "none":
            raise UsageError(
                "--sample-break-mode must be none with --task language_modeling_random_offsets, which moves blocks: "
                f"got {mode}"
            )
        blocks = at_random_offset(dataset, self.args.tokens_per_sample, (self.args.seed, settings.get("epoch", 1)))
        iterator = super().get_batch_iterator(blocks, *args, **{**settings, "disable_iterator_cache": True})
        # Its workers end with it.
        iterator.persistent_workers = False
        return iterator
