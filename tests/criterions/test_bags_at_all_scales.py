"""Bags of words: a coarse model's loss, and an auxiliary one at all scales of the top-down model (Section 6.2)."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.models import BaseFairseqModel

from fairseq_ms.criterions.bag_of_words import BagOfWordsCriterion
from tests.core.test_wrapped import Adapter
from tests.registry import build, dictionary, random_case

SYMBOLS = 7
# fairseq takes the softmax in float32: sums of about 100 terms of order 1, each rounded to 1e-7 of itself.
SINGLE = 1e-4
FLAGS = {
    "decoder_embed_dim": 8,
    "decoder_ffn_embed_dim": 6,
    "decoder_attention_heads": 2,
    "scale_layers": "6x=1,2x=1,1x=1",
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "init_std": 0.5,
}


def topdown(weight: float, criterion: str = "bag_of_words", **more: Any) -> BaseFairseqModel:
    torch.manual_seed(3)
    flags = {**FLAGS, "bag_of_words_weight": weight, "criterion": criterion, **more}
    return build("multiscale_topdown", flags, dictionary(SYMBOLS), positions=16).double()


def criterion_of(words: Any) -> BagOfWordsCriterion:
    return BagOfWordsCriterion(Namespace(target_dictionary=words), sentence_avg=False)


def sample(rows: int, length: int) -> dict[str, Any]:
    torch.manual_seed(4)
    tokens = torch.randint(4, 4 + SYMBOLS, (rows, length + 1))
    targets = tokens[:, 1:].clone()
    targets[1, -3:] = 1
    return {
        "net_input": {"src_tokens": tokens[:, :-1], "src_lengths": None},
        "target": targets,
        "ntokens": int((targets != 1).sum()),
    }


def by_loops(model: Any, given: dict[str, Any], weight: float) -> torch.Tensor:
    """Sums over the blocks of every coarse scale, and over each block's own targets."""
    tokens, targets = given["net_input"]["src_tokens"], given["target"]
    total = torch.zeros((), dtype=torch.double)
    for scale, blocks_BCD in model.decoder.core.representations(tokens).items():
        for row, blocks_CD in enumerate(blocks_BCD):
            for block, features_D in enumerate(blocks_CD):
                scores = model.decoder.output_layer(features_D[None, None])[0, 0]
                for target in targets[row, block * scale : (block + 1) * scale]:
                    if target != 1:
                        loss = scores.logsumexp(0) - scores[target]
                        total = total + (loss if scale == 1 else weight * loss)
    return total


# 13 tokens divide neither scale: the last bags are smaller. What wraps the output is called.
@pytest.mark.parametrize(("length", "wrapped"), [(4, False), (6, False), (13, False), (13, True)])
def test_the_loss_and_its_gradients_equal_loops_over_scales_blocks_and_targets(length: int, wrapped: bool) -> None:
    model, given = topdown(0.3), sample(2, length)
    if wrapped:
        model.decoder.core.project = Adapter(model.decoder.core.project)
    loss, size, logged = criterion_of(dictionary(SYMBOLS))(model.train(), given)
    expected = by_loops(model, given, 0.3)
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=SINGLE)
    assert size == given["ntokens"]
    parameters = list(model.parameters())
    fast = torch.autograd.grad(loss, parameters)
    naive = torch.autograd.grad(expected, parameters)
    assert all(torch.allclose(a, b, rtol=0, atol=SINGLE) for a, b in zip(fast, naive, strict=True))
    assert float(logged["bags"]) > 0.0


def test_what_is_logged_as_the_loss_is_the_language_models_alone_and_so_is_validation() -> None:
    model, given, criterion = topdown(0.3), sample(2, 13), criterion_of(dictionary(SYMBOLS))
    plain = by_loops(model, given, 0.0)
    for mode in (model.train(), model.eval()):
        torch.testing.assert_close(criterion(mode, given)[2]["loss"], plain.detach().float(), rtol=0, atol=SINGLE)
    torch.testing.assert_close(criterion(model.eval(), given)[0], plain.float(), rtol=0, atol=SINGLE)


@pytest.mark.parametrize("seed", range(12))
def test_the_loss_of_a_coarse_model_is_that_of_cross_entropy_token_by_token(seed: int) -> None:
    case = random_case("coarse_lm", seed)
    tokens, targets = case.tokens(3, 17), case.tokens(3, 17)
    targets[2, 9:] = case.dictionary.pad()
    given = {"net_input": {"src_tokens": tokens}, "target": targets, "ntokens": 43}
    plain = CrossEntropyCriterion(Namespace(target_dictionary=case.dictionary), sentence_avg=False)
    for reduce in (True, False):
        got, expected = (kind(case.model, given, reduce=reduce)[0] for kind in (criterion_of(case.dictionary), plain))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_weight_without_its_criterion_and_a_criterion_without_a_weight_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^--bag-of-words-weight needs --criterion bag_of_words .* 0.3 and cross"):
        topdown(0.3, "cross_entropy")
    with pytest.raises(ValueError, match=r"^--bag-of-words-weight has no effect with the single scale"):
        topdown(0.3, scale_layers="1x=2")
    model = topdown(0.0)
    with pytest.raises(ValueError, match=r"^--criterion bag_of_words needs --arch coarse_lm, or multiscale_topdown"):
        criterion_of(dictionary(SYMBOLS))(model, sample(2, 13))
