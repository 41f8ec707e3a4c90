"""``bag_of_words``: how well ``coarse_lm`` predicts which words come next, in whatever order.

Multi-scale Transformer LMs, Section 6.2.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.errors import UsageError
from fairseq_ms.lm.output_matrix import output_matrix
from fairseq_ms.ops.linear_cross_entropy import checkpointed_cross_entropy


@register_criterion("bag_of_words", dataclass=CrossEntropyCriterionConfig)
class BagOfWordsCriterion(CrossEntropyCriterion):
    """Cross-entropy between a block's prediction and the uniform distribution over the next k tokens.

    It never holds all logits.

    A block's cross-entropy is the mean of its k tokens' negative log-probabilities, so the loss is their sum
    over all tokens, as fairseq's own cross-entropy sums it, and "ppl" compares with that of any model. The last
    bag of a sample may have fewer tokens than k; it counts by how many it has.
    """

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """The loss in nats (summed over the batch, or (B * T,) with ``reduce=False``), its size, what to log.

        Raises UsageError if the model is not ``coarse_lm``.
        """
        _check(model)
        net_output = model(**sample["net_input"], per_block=True, features_only=True)
        loss, _ = self.compute_loss(model, net_output, sample, reduce=reduce)
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logged = {
            "loss": loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }
        return loss, sample_size, logged

    def compute_loss(
        self, model: Any, net_output: tuple[Tensor, dict[str, Any]], sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        """One softmax a block, read at the k targets that it predicts."""
        weight_VD = output_matrix(model)
        assert weight_VD is not None
        x_BCD, targets_BT = net_output[0], model.get_targets(sample, net_output)
        factor, length = net_output[1]["scale"], targets_BT.size(1)
        missing = x_BCD.size(1) * factor - length
        bags_NK = F.pad(targets_BT, (0, missing), value=self.padding_idx).view(-1, factor)
        losses_NK = checkpointed_cross_entropy(x_BCD.flatten(0, 1), weight_VD, bags_NK, self.padding_idx)
        loss = losses_NK.sum() if reduce else losses_NK.view(len(targets_BT), -1)[:, :length].reshape(-1)
        return loss, loss


def _check(model: torch.nn.Module) -> None:
    """Raise UsageError unless the model, perhaps wrapped for distributed training, predicts bags."""
    from fairseq_ms.models.coarse import CoarseLanguageModel

    inner = model
    while not isinstance(inner, CoarseLanguageModel):
        inner = getattr(inner, "module", None)  # type: ignore[assignment]
        if inner is None:
            name = type(model).__name__
            raise UsageError(f"--criterion bag_of_words needs --arch coarse_lm: got a {name}")
