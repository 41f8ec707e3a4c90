"""``streaming_language_modeling``: a corpus read in the order of time, with a memory that goes along."""

import logging
import os
from dataclasses import dataclass
from typing import Any, Optional

import torch
from fairseq import utils
from fairseq.data import Dictionary, MonolingualDataset, TokenBlockDataset, data_utils, iterators
from fairseq.data.indexed_dataset import get_available_dataset_impl
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import II
from torch import nn

from fairseq_ms.data.stream_memory import CarriedMemory, cannot_continue, extra_of
from fairseq_ms.data.streams import Corpus, StreamBatches
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.choices import option
from fairseq_ms.lm.streaming import StreamingLanguageModel, with_a_memory

logger = logging.getLogger(__name__)

# Segments are scored together up to about as many tokens of a row as fairseq scores in a block.
_ROW_TOKENS = 512


@dataclass
class StreamingLanguageModelingFlags(FairseqDataclass):
    """Flags of the task."""

    data: Optional[str] = option(None, "path to data directory")
    tokens_per_sample: Optional[int] = option(
        None, "segment length; a trained model is used with its own unless another is given"
    )
    sample_break_mode: ChoiceEnum(["none", "eos"]) = option(  # type: ignore[valid-type]
        "none",
        "none reads the corpus as streams that carry a memory; eos makes every line a sample of "
        "its own that begins without one",
    )
    add_bos_token: bool = option(False, "refused by this task: a stream begins with the end-of-sentence symbol")
    max_target_positions: Optional[int] = option(None, "refused by this task: a stream has no last position")
    dataset_impl: Optional[ChoiceEnum(get_available_dataset_impl())] = II("dataset.dataset_impl")  # type: ignore[valid-type]


@register_task("streaming_language_modeling", dataclass=StreamingLanguageModelingFlags)
class StreamingLanguageModelingTask(LanguageModelingTask):
    """Train and evaluate a streaming model on a corpus of parallel streams.

    The task owns the memories: one for training, which checkpoints carry, and one for whatever is being
    evaluated. A memory begins empty with its corpus and moves from batch to batch.
    """

    def __init__(self, args: Any, dictionary: Dictionary) -> None:
        super().__init__(args, dictionary)
        self.model: StreamingLanguageModel | None = None
        self.carried: dict[bool, CarriedMemory] = {}
        # The batches of training, whose position a checkpoint sets before it hands on what else it has.
        self._training: iterators.EpochBatchIterator | None = None
        # How corpora are dealt out, for as long as fairseq keeps iterators over that.
        self._dealt: dict[tuple[Any, ...], tuple[StreamBatches, CarriedMemory]] = {}

    @classmethod
    def setup_task(cls, args: Any, **kwargs: Any) -> "StreamingLanguageModelingTask":
        """fairseq's entry point; raises UsageError on flags that do not apply to streams."""
        if args.add_bos_token:
            raise UsageError(
                "--add-bos-token must not be set with --task streaming_language_modeling: a stream begins with "
                "the end-of-sentence symbol"
            )
        if args.max_target_positions is not None:
            raise UsageError(
                "--max-target-positions must not be set with --task streaming_language_modeling: a stream has "
                f"no last position, got {args.max_target_positions}"
            )
        dictionary = Dictionary.load(os.path.join(utils.split_paths(args.data or ".")[0], "dict.txt"))
        logger.info(f"dictionary: {len(dictionary)} types")
        return cls(args, dictionary)

    def build_model(self, args: Any, from_checkpoint: bool = False) -> nn.Module:
        """The model, which has to be a streaming one; raises UsageError otherwise."""
        name = getattr(args, "_name", None) or getattr(args, "arch", None)
        if not issubclass(ARCH_MODEL_REGISTRY.get(name, nn.Module), StreamingLanguageModel):
            raise UsageError(
                "--arch must be a model with a memory for --task streaming_language_modeling "
                f"({', '.join(with_a_memory())}): got {name}"
            )
        model = super().build_model(args, from_checkpoint)
        assert isinstance(model, StreamingLanguageModel)
        self.model = model
        return model

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load a split; raises UsageError if it is missing or empty."""
        paths = utils.split_paths(self.args.data)
        path = os.path.join(paths[(epoch - 1) % len(paths)], split)
        lines = data_utils.load_indexed_dataset(path, self.dictionary, self.args.dataset_impl, combine=combine)
        if lines is None or not len(lines):
            raise UsageError(f"data must have a split named {split} with at least one token: got {path}")
        if str(self.args.sample_break_mode) == "eos":
            blocks = TokenBlockDataset(
                lines,
                lines.sizes,
                None,
                pad=self.dictionary.pad(),
                eos=self.dictionary.eos(),
                break_mode="eos",
                include_targets=True,
            )
            self.datasets[split] = MonolingualDataset(
                blocks,
                blocks.sizes,
                self.dictionary,
                self.dictionary,
                add_eos_for_other_targets=True,
                shuffle=True,
                targets=["future"],
            )
            return
        self.datasets[split] = Corpus(lines, lines.sizes, self.dictionary.eos())

    def get_batch_iterator(self, dataset: Any, **settings: Any) -> iterators.EpochBatchIterator:
        """Batches of a corpus in the order of time, never shuffled; other datasets go fairseq's way."""
        # fairseq says how to shuffle in training and nowhere else.
        training = settings.get("grouped_shuffling") is not None
        settings["grouped_shuffling"] = bool(settings.get("grouped_shuffling"))
        in_order = isinstance(dataset, Corpus)
        if in_order:
            dataset = self._dealt_out(dataset, training, **settings)
            settings |= {"grouped_shuffling": False, "max_positions": None}
        iterator = super().get_batch_iterator(dataset, **settings)
        iterator.disable_shuffling |= in_order
        self._training = iterator if training else self._training
        return iterator

    def _dealt_out(
        self,
        corpus: Corpus,
        training: bool,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        num_shards: int = 1,
        shard_id: int = 0,
        disable_iterator_cache: bool = False,
        **unused: Any,
    ) -> StreamBatches:
        """A corpus as streams, from fairseq's limits on a batch; what is ``carried`` is then their memory.

        Raises UsageError if a batch has no room for a segment, or for a stream.
        """
        assert self.model is not None, "fairseq builds the model before it reads data"
        segment, reach = self.model.decoder.core.segment_len, self.model.decoder.core.memory_reach()
        if max_tokens is not None and max_tokens < segment:
            raise UsageError(
                f"--max-tokens must be at least --tokens-per-sample {segment}, so that a segment fits: got {max_tokens}"
            )
        if max_sentences is not None and max_sentences < 1:
            raise UsageError(f"--batch-size must be at least 1, the number of streams: got {max_sentences}")
        row, warm_up = segment, 0 if training else reach
        if warm_up and max_tokens is not None:
            row = segment * max(1, min(_ROW_TOKENS, max_tokens // (max_sentences or 1)) // segment)
        by_tokens = max_tokens // row if max_tokens is not None else None
        streams = min(count for count in (max_sentences, by_tokens, len(corpus)) if count is not None)
        if warm_up:
            # A stream shorter than twice what it reads first would spend its time on warming up.
            streams = min(streams, max(1, len(corpus) // (2 * warm_up * segment * num_shards)))
        key = (id(corpus), training, streams, row, reach, num_shards, shard_id)
        if (found := self._dealt.get(key)) is None:
            pad = self.dictionary.pad()
            batches = StreamBatches(corpus, segment, streams, num_shards, warm_up, row // segment, pad)
            found = batches, CarriedMemory(batches, reach, shard_id, self.model.memory_flags())
        if not disable_iterator_cache:
            self._dealt[key] = found
        batches, self.carried[training] = found
        return batches

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        """As fairseq's, with the streams' memory and the loss that the model may add."""

        def with_memory(model: nn.Module, sample: Any) -> tuple[torch.Tensor, int, dict[str, Any]]:
            with self._carry(True, sample, model) as extra:
                loss, size, logged = criterion(model, sample)
            if extra.get("auxiliary_loss") is not None:
                # The criterion's loss is a sum that fairseq divides by the sample size. A row counts as its targets
                # do, so that the sum is the same whichever rows share a process.
                targets_B = (sample["target"] != self.dictionary.pad()).sum(dim=1)
                auxiliary = (extra["auxiliary_loss"] * targets_B).sum() / targets_B.sum().clamp(min=1) * size
                logged["auxiliary_loss"] = auxiliary.detach()
                loss = loss + auxiliary
            return loss, size, logged

        return super().train_step(sample, model, with_memory, optimizer, update_num, ignore_grad)

    def optimizer_step(self, optimizer, model, update_num):
        """As fairseq's, which then begins an update, or the same one again."""
        if True in self.carried:
            self.carried[True].between_updates = True
        super().optimizer_step(optimizer, model, update_num)

    def valid_step(self, sample, model, criterion):
        """As fairseq's, with the streams' memory."""
        with self._carry(False, sample, model):
            return super().valid_step(sample, model, criterion)

    def _carry(self, training: bool, sample: Any, model: nn.Module) -> Any:
        """A context in which the model is called, with the memory of the sample's streams where it has any."""
        assert self.model is not None
        if "stream" not in sample:
            return extra_of(model)
        return self.carried[training].around(sample, model, self.model)

    def eval_lm_dataloader(self, dataset, max_tokens=36000, batch_size=None, context_window=0, **kwargs) -> Any:
        """Batches for ``fairseq-eval-lm``, which calls the model itself; raises UsageError on a context window."""
        if context_window > 0:
            raise UsageError(
                "--context-window must not be set with --task streaming_language_modeling, whose context is the "
                f"memory: got {context_window}"
            )
        iterator = self.get_batch_iterator(dataset, max_tokens=max_tokens, max_sentences=batch_size, **kwargs)
        batches = iterator.next_epoch_itr(shuffle=False)
        if not isinstance(dataset, Corpus):
            return batches
        assert self.model is not None
        return iterators.CountingIterator(self.carried[False].along(batches, self.model), total=len(batches))

    def reduce_metrics(self, logging_outputs: Any, criterion: Any) -> None:
        """As fairseq's, and the auxiliary loss where there is one."""
        super().reduce_metrics(logging_outputs, criterion)
        if any("auxiliary_loss" in log for log in logging_outputs):
            total = sum(log.get("auxiliary_loss", 0) for log in logging_outputs)
            size = sum(log.get("sample_size", 0) for log in logging_outputs)
            metrics.log_scalar("auxiliary_loss", total / size, size, round=6)

    def before_checkpoint(self) -> None:
        """This package's hook, called on every rank: bring what all of them remember to the one that writes."""
        if True in self.carried:
            self.carried[True].gather()

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """fairseq's hook: what of the task goes into a checkpoint."""
        carried = self.carried[True].state_dict() if True in self.carried else {}
        return {type(self).__name__: {**carried, "sample_break_mode": str(self.args.sample_break_mode)}}

    def set_checkpoint_dict(self, saved: dict[str, Any]) -> None:
        """fairseq's hook: take up the memory of a checkpoint whose epoch is continued.

        Raises UsageError if it cannot be continued with these flags.
        """
        then, now = saved.get("sample_break_mode", "none"), str(self.args.sample_break_mode)
        if then == now == "none":
            self.carried[True].load_state_dict(saved)
        elif then != now and self._training is not None and self._training.iterations_in_epoch > 0:
            raise cannot_continue("--sample-break-mode", then, now)
