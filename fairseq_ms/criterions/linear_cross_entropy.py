"""``linear_cross_entropy``: the loss of ``cross_entropy``, without ever holding all logits."""

from dataclasses import dataclass
from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.dataclass.constants import DDP_BACKEND_CHOICES
from omegaconf import II
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_ms.core.ops.linear_cross_entropy import linear_cross_entropy, most_probable
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.output_matrix import output_matrix, without_output_matrix


@dataclass
class LinearCrossEntropyFlags(LabelSmoothedCrossEntropyCriterionConfig):
    """Flags of ``linear_cross_entropy``: those of ``label_smoothed_cross_entropy``."""

    find_unused_parameters: bool = II("distributed_training.find_unused_parameters")
    # Older checkpoints have it.
    ddp_backend: DDP_BACKEND_CHOICES = II("distributed_training.ddp_backend")


@register_criterion("linear_cross_entropy", dataclass=LinearCrossEntropyFlags)
class LinearCrossEntropyCriterion(LabelSmoothedCrossEntropyCriterion):
    """fairseq's ``label_smoothed_cross_entropy``, whose smoothing is 0 by default, from features and output matrix.

    Losses, gradients and what is logged are the same. Accuracy, if asked for, takes a second product with the matrix.
    """

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "LinearCrossEntropyCriterion":
        """fairseq's entry point; raises UsageError where the matrix is out of reach."""
        if cfg.find_unused_parameters:
            why = "with --criterion linear_cross_entropy, which reads the output matrix outside the model"
            raise UsageError(f"--find-unused-parameters must not be given {why}")
        return cls(task, cfg.sentence_avg, cfg.label_smoothing, cfg.ignore_prefix_size, cfg.report_accuracy)

    @staticmethod
    def check(model: Any) -> None:
        """Raise UsageError for a model without an output matrix."""
        if (without := without_output_matrix(model)) is not None:
            raise UsageError(
                f"--criterion linear_cross_entropy needs a model whose logits are its features times one matrix: "
                f"got {without}"
            )

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """The loss in nats (summed over the batch, or (B * T,) with ``reduce=False``), its size, what to log.

        Raises UsageError if the model has no output matrix. Where something wraps it, it is called, for all logits.
        """
        self.check(model)
        if output_matrix(model) is None:
            return super().forward(model, sample, reduce)
        features_only = {**sample["net_input"], "features_only": True}
        return super().forward(model, {**sample, "net_input": features_only}, reduce)

    def compute_loss(
        self, model: Any, net_output: tuple[Tensor, Any], sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The loss, and without label smoothing."""
        if output_matrix(model) is None:
            loss, nll_loss = super().compute_loss(model, net_output, sample, reduce)
            # Without smoothing, theirs may be 0 times infinity.
            return (loss if self.eps else nll_loss), nll_loss
        x_QD, target_Q, weight_VD, never = self._rows(model, net_output, sample)
        nll_loss = linear_cross_entropy(x_QD, weight_VD, target_Q, self.padding_idx, reduce, never)
        if self.eps == 0.0:
            return nll_loss, nll_loss
        symbols = weight_VD.size(0)
        excess = above_mean(x_QD, weight_VD, target_Q, self.padding_idx)
        excess = excess.sum() if reduce else excess
        return nll_loss + self.eps * symbols / (symbols - 1) * excess, nll_loss

    def compute_accuracy(
        self, model: Any, net_output: tuple[Tensor, Any], sample: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """How many targets have the largest logit, and how many there are."""
        if output_matrix(model) is None:
            return super().compute_accuracy(model, net_output, sample)
        x_QD, target_Q, weight_VD, never = self._rows(model, net_output, sample)
        counts = target_Q != self.padding_idx
        return ((most_probable(x_QD, weight_VD, never) == target_Q) & counts).sum(), counts.sum()

    def _rows(
        self, model: Any, net_output: tuple[Tensor, Any], sample: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
        """Features (Q, D) and targets (Q,), without the prefix that is to be ignored, and the ``output_matrix``."""
        matrix = output_matrix(model)
        assert matrix is not None
        x_BTD, target_BT = net_output[0], model.get_targets(sample, net_output)
        skipped = self.ignore_prefix_size
        return x_BTD[:, skipped:].flatten(0, 1), target_BT[:, skipped:].flatten(), *matrix


def above_mean(x_QD: Tensor, weight_VD: Tensor, target_Q: Tensor, padding: int) -> Tensor:
    """The target's logit minus the mean of all V, (Q,), 0 where the target is padding.

    Label smoothing adds it to the loss: with e' = e V / (V - 1),
    (1 - e') nll + e' (mean of all negative log probabilities) equals nll + e' (target's logit - mean logit).
    """

    def difference(x_QD: Tensor, weight_VD: Tensor) -> Tensor:
        # At least float32, for the mean of V small numbers.
        mean_D = weight_VD.mean(0, dtype=torch.promote_types(weight_VD.dtype, torch.float32))
        return (x_QD * (F.embedding(target_Q, weight_VD) - mean_D)).sum(1).masked_fill(target_Q == padding, 0.0)

    return checkpoint(difference, x_QD, weight_VD, use_reentrant=False, preserve_rng_state=False)
