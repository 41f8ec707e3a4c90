"""What fairseq's tasks find out before they train a model of this package.

A checkpoint that is loaded for evaluation keeps loading whatever it was trained with, so these rules, and those of
``LanguageModel.refuse_idle``, are for models that are built to be trained.
"""

from __future__ import annotations

from typing import Any

from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.tasks import LegacyFairseqTask

from fairseq_ms.errors import UsageError

# They ask for the probabilities of all symbols, which fairseq's adaptive softmax gives without a gradient.
_ALL_SYMBOLS = (CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion)


def check_criterion(criterion: Any, name: str, cutoff: str | None) -> None:
    """Raise UsageError unless the criterion trains a model with these ``--adaptive-softmax-cutoff``."""
    if cutoff and isinstance(criterion, _ALL_SYMBOLS):
        raise UsageError(
            f"--criterion must be adaptive_loss to train with --adaptive-softmax-cutoff {cutoff}: got {name}"
        )
    if not cutoff and isinstance(criterion, AdaptiveLoss):
        raise UsageError(f"--adaptive-softmax-cutoff must be given with --criterion {name}: got none")


def install() -> None:
    """Have language modelling tasks say in ``from_checkpoint`` what they build a model for, and check the criterion.

    Calling it again does nothing.
    """
    task = LegacyFairseqTask
    if getattr(task.build_model, "says_what_for", False):
        return
    make_model, make_criterion = task.build_model, task.build_criterion

    # fairseq looks for the argument's name before it passes it.
    def build_model(self: Any, args: Any, from_checkpoint: bool = False) -> Any:
        from fairseq_ms.lm.output_matrix import without_output_matrix

        self.from_checkpoint = from_checkpoint
        model = make_model(self, args, from_checkpoint)
        trains = type(model).__module__.startswith("fairseq_ms.") and not from_checkpoint
        self.cutoff_to_train = (getattr(args, "adaptive_softmax_cutoff", None),) if trains else None
        self.trains_without_matrix = None if from_checkpoint else without_output_matrix(model)
        return model

    def build_criterion(self: Any, args: Any) -> Any:
        from fairseq_ms.criterions.linear_cross_entropy import LinearCrossEntropyCriterion

        criterion = make_criterion(self, args)
        if getattr(self, "cutoff_to_train", None) is not None:
            check_criterion(criterion, getattr(args, "_name", type(criterion).__name__), *self.cutoff_to_train)
        if isinstance(criterion, LinearCrossEntropyCriterion):
            criterion.check_output(getattr(self, "trains_without_matrix", None))
        return criterion

    build_model.says_what_for = True  # type: ignore[attr-defined]
    task.build_model, task.build_criterion = build_model, build_criterion
