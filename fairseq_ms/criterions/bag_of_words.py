"""``bag_of_words``: how well a coarse scale predicts which words come next, in whatever order.

``coarse_lm`` is trained on it alone, ``multiscale_topdown`` with ``--bag-of-words-weight`` on it beside its own loss.

Multi-scale Transformer LMs, Section 6.2.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.ops.linear_cross_entropy import cross_entropy_of
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.output_matrix import output_projection, unwrapped


@register_criterion("bag_of_words", dataclass=CrossEntropyCriterionConfig)
class BagOfWordsCriterion(CrossEntropyCriterion):
    """Cross-entropy between a block's prediction and the uniform distribution over the next k tokens.

    It never holds the logits of all coarse blocks; of ``multiscale_topdown`` it holds those of the tokens.

    A block's cross-entropy is the mean of its k tokens' negative log-probabilities, so the loss is their sum
    over all tokens, as fairseq's own cross-entropy sums it, and "ppl" compares with that of any model. The last
    bag of a sample may have fewer tokens than k; it counts by how many it has.

    Of ``multiscale_topdown`` the loss is the cross-entropy of its tokens, which is what is logged, and in training the
    weighted sum of this over its coarse scales; at 1x the two would be the same.
    """

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """The loss in nats (summed over the batch, or (B * T,) with ``reduce=False``), its size, what to log.

        Raises UsageError if the model is neither ``coarse_lm`` nor a ``multiscale_topdown`` with a weight for bags.
        """
        # None is for a model that has nothing else to train on.
        weight = getattr(unwrapped(model), "bag_of_words_weight", 0.0)
        if weight == 0.0:
            raise UsageError(
                "--criterion bag_of_words needs --arch coarse_lm, or multiscale_topdown with a --bag-of-words-weight "
                f"above 0: got a {type(model).__name__}"
            )
        if weight is not None:
            return self._beside_tokens(model, sample, weight, reduce)
        blocks = {**sample["net_input"], "per_block": True, "features_only": True}
        return super().forward(model, {**sample, "net_input": blocks}, reduce)

    def _beside_tokens(
        self, model: Any, sample: dict[str, Any], weight: float, reduce: bool
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """The loss of the top-down model, in evaluation that of its tokens alone."""
        net_output = model(**sample["net_input"], bags=model.training)
        loss, _ = super().compute_loss(model, net_output, sample, reduce=reduce)
        size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        counts = {"ntokens": sample["ntokens"], "nsentences": sample["target"].size(0), "sample_size": size}
        logged = {"loss": loss.data, **counts}
        if model.training:
            outputs = [(x_BCD, {"scale": scale}) for scale, x_BCD in net_output[1]["bags"].items()]
            losses = [self.compute_loss(model, output, sample, reduce=reduce)[0] for output in outputs]
            bags = torch.stack(losses).sum(0)
            loss = loss + weight * bags
            logged["bags"] = bags.data.sum()
        return loss, size, logged

    def compute_loss(
        self, model: Any, net_output: tuple[Tensor, dict[str, Any]], sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        """One softmax a block, read at the k targets that it predicts."""
        project = output_projection(model)
        assert project is not None
        x_BCD, targets_BT = net_output[0], model.get_targets(sample, net_output)
        factor, length = net_output[1]["scale"], targets_BT.size(1)
        missing = x_BCD.size(1) * factor - length
        bags_QK = F.pad(targets_BT, (0, missing), value=self.padding_idx).view(-1, factor)
        loss = cross_entropy_of(x_BCD.flatten(0, 1), project, bags_QK, self.padding_idx, reduce)
        if not reduce:
            loss = loss.view(len(targets_BT), -1)[:, :length].reshape(-1)
        return loss, loss
