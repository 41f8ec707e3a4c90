"""The criterion of the first phase: which chunk comes next, among those of this batch and of some more."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.data import MonolingualDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor

from fairseq_ms.core.hierarchical.chunks import Segmentation, unique_chunks
from fairseq_ms.data.chunk_sampling import extended, predicted_chunks, random_blocks
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.choices import option

Sample = dict[str, Any]
"""A batch as fairseq collates it, or what is logged of one."""

# The first entry of a key: any other use of the seed draws other blocks.
_NEGATIVES = 1


@dataclass
class InBatchSampledSoftmaxFlags(FairseqDataclass):
    """Flags of ``--criterion in_batch_sampled_softmax``."""

    negative_batches: int = option(3, "random batches whose chunks are candidates too; they are only encoded")
    seed: int = II("common.seed")
    train_subset: str = II("dataset.train_subset")


@register_criterion("in_batch_sampled_softmax", dataclass=InBatchSampledSoftmaxFlags)
class InBatchSampledSoftmax(FairseqCriterion):
    """Softmax over chunks in the space of the encoder (HAED, Section 3.2 and Appendix B).

    Candidates for a chunk are all chunks that are predicted in this batch, and those of ``negative_batches`` further
    batches of as many random blocks of the training data. Which blocks is a function of the seed, of the number of
    the update and of the row they are for, so that a run that is killed and resumed repeats them. The loss is in
    nats, the sample size the number of chunks predicted.

    Raises:
        UsageError: for flags out of range, and for a model that has no such phase.
    """

    def __init__(
        self,
        task: FairseqTask,
        negative_batches: int,
        seed: int,
        train_subset: str = "train",
    ) -> None:
        super().__init__(task)
        if negative_batches < 0:
            raise UsageError(f"--negative-batches must be at least 0: got {negative_batches}")
        self.negative_batches = negative_batches
        self.seed = seed
        self.train_subset = train_subset

    def forward(self, model: BaseFairseqModel, sample: Sample, reduce: bool = True) -> tuple[Tensor, int, Sample]:
        """The summed loss, the number of chunks predicted and what is logged."""
        segmentation = getattr(model, "segmentation", None)
        if not isinstance(segmentation, Segmentation):
            raise UsageError(
                "--criterion in_batch_sampled_softmax trains the first phase of haed and hred only: "
                f"got a {type(model).__name__}"
            )
        tokens_BT = extended(sample["net_input"]["src_tokens"], sample["target"], self.padding_idx)
        own_XL = predicted_chunks(segmentation, tokens_BT)
        candidates_AL, _, counts_A = unique_chunks(torch.cat([own_XL, self._drawn(model, sample)]))
        found = model(tokens_BT, candidates_AL, counts_A)
        predicted = found.rank_X.numel()
        logging_output = {
            "loss": found.loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": predicted,
            "top1": (found.rank_X < 1).sum(),
            "top5": (found.rank_X < 5).sum(),
            "negatives": found.negatives_X.sum(),
        }
        return found.loss, predicted, logging_output

    def _drawn(self, model: BaseFairseqModel, sample: Sample) -> Tensor:
        """The chunks of the further batches."""
        tokens_BT = sample["target"]
        # Validation asks for the same negatives every time, so that its losses compare.
        update = model.update + 1 if model.training else 0
        # By rows, so that it is the same how they are spread over processes and batches.
        keys = [[self.seed, _NEGATIVES, update, row] for row in sample["id"].tolist()]
        if self.negative_batches == 0:
            return tokens_BT.new_empty(0, model.segmentation.max_length)
        blocks_BT = random_blocks(self._dataset(), self.negative_batches, keys, self.padding_idx)
        return predicted_chunks(model.segmentation, blocks_BT.to(tokens_BT.device))

    def _dataset(self) -> MonolingualDataset:
        """The training data; where it is not loaded, as under ``fairseq-validate``, what is."""
        datasets = self.task.datasets
        return datasets[self.train_subset] if self.train_subset in datasets else next(iter(datasets.values()))

    @staticmethod
    def reduce_metrics(logging_outputs: list[Sample]) -> None:
        """Bits a chunk, share of chunks ranked first and among the first five, and negatives a chunk."""

        def total(name: str) -> float:
            return sum(log.get(name, 0) for log in logging_outputs)

        predicted = total("sample_size")
        chunks = max(int(predicted), 1)
        metrics.log_scalar("loss", total("loss") / chunks / math.log(2), predicted, round=3)
        metrics.log_scalar("top1", 100.0 * total("top1") / chunks, predicted, round=2)
        metrics.log_scalar("top5", 100.0 * total("top5") / chunks, predicted, round=2)
        metrics.log_scalar("negatives", total("negatives") / chunks, predicted, round=1)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """All of them are sums."""
        return True
