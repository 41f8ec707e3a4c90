"""Training by ``linear_cross_entropy`` is training by fairseq's criterions of logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.logging import metrics
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.ops import linear_cross_entropy as module
from fairseq_ms.criterions.linear_cross_entropy import LinearCrossEntropyCriterion, above_mean
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.output_matrix import output_matrix
from fairseq_ms.tasks.streaming_language_modeling import StreamingLanguageModelingTask
from tests.core.test_wrapped import Adapter
from tests.registry import ARCHITECTURES, build, dictionary, random_case

ARCHS = [arch for arch in ARCHITECTURES if output_matrix(random_case(arch, 0).model) is not None]
WORDS = dictionary(19)
FAIRSEQS = {"decoder_embed_dim": 8, "decoder_ffn_embed_dim": 12, "decoder_attention_heads": 2, "decoder_layers": 2}


def small(arch: str, tied: bool, **flags: Any) -> nn.Module:
    """A model in training mode, with dropout, and weights large enough for every path to matter.

    It is in float64, in which only fairseq's log_softmax, always of float32, rounds what can be seen.
    """
    if arch == "transformer_lm":
        flags = {**FAIRSEQS, "decoder_input_dim": 8, "decoder_output_dim": 8, "tpu": False, **flags}
    else:
        flags = {**random_case(arch, 1).flags, "init_std": 0.4, **flags}
    torch.manual_seed(1)
    return build(arch, {**flags, "dropout": 0.2, "share_decoder_input_output_embed": tied}, WORDS).double().train()


def batch(rows: int = 3, length: int = 16) -> dict[str, Any]:
    """Rows of different lengths, padded on the right."""
    tokens = torch.randint(4, len(WORDS), (rows, length + 1))
    for row in range(1, rows):
        tokens[row, length + 1 - 3 * row :] = WORDS.pad()
    target = tokens[:, 1:].contiguous()
    return {
        "net_input": {"src_tokens": tokens[:, :-1], "src_lengths": target.ne(WORDS.pad()).sum(1)},
        "target": target,
        "ntokens": int(target.ne(WORDS.pad()).sum()),
    }


def criterion(kind: type, sentence_avg: bool = False, **flags: Any) -> Any:
    task = SimpleNamespace(target_dictionary=WORDS)
    if kind is not CrossEntropyCriterion:
        flags = {"label_smoothing": 0.0, **flags}
    return kind(task, sentence_avg=sentence_avg, **flags)


def step(model: nn.Module, kind: Any, *samples: dict[str, Any]) -> tuple[list, dict[str, Tensor]]:
    """What the criterion returns for each sample, and the gradients of all of them together."""
    model.zero_grad()
    torch.manual_seed(3)
    returned = []
    for sample in samples:
        loss, size, logged = kind(model, sample)
        loss.backward()
        returned.append((loss.detach(), size, logged))
    return returned, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple[list, dict[str, Tensor]], expected: tuple[list, dict[str, Tensor]]) -> None:
    for (loss, size, logged), (other, other_size, other_logged) in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(loss, other, rtol=1e-6, atol=0.0, check_dtype=False)
        assert size == other_size
        assert {**logged, **other_logged}.keys() == logged.keys()
        for name, value in other_logged.items():
            assert float(logged[name]) == pytest.approx(float(value), rel=1e-6), name
    assert_same_gradients(found[1], expected[1])


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        # Relative to the largest.
        distance = float((found[name] - gradient).abs().max()) / largest
        assert distance <= 1e-6, f"{name}: {distance}"


@pytest.fixture(autouse=True)
def _few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 7)


def test_every_architecture_but_those_of_chunks_has_an_output_matrix() -> None:
    assert set(ARCHITECTURES) - set(ARCHS) == {"haed", "hred"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", [*ARCHS, "transformer_lm"])
def test_loss_and_gradients_are_those_of_cross_entropy(arch: str, tied: bool) -> None:
    model = small(arch, tied)
    samples = [batch(), batch(2)]
    for sentence_avg in (False, True):
        found = step(model, criterion(LinearCrossEntropyCriterion, sentence_avg), *samples)
        expected = step(model, criterion(CrossEntropyCriterion, sentence_avg), *samples)
        assert_same(found, expected)
        assert found[0][0][1] == (3 if sentence_avg else samples[0]["ntokens"])


@pytest.mark.parametrize("tied", [True, False])
def test_symbols_that_are_never_predicted_are_so_without_all_logits(tied: bool) -> None:
    never = f"{WORDS[0]} {WORDS[7]} {WORDS[9]}"
    model: Any = small("vanilla_lm", tied, unpredicted_symbols=never)
    sample = batch()
    for symbol in (7, 9):
        sample["target"].masked_fill_(sample["target"] == symbol, WORDS.pad())
    expected = step(model, criterion(CrossEntropyCriterion), sample)
    ours = criterion(LinearCrossEntropyCriterion, report_accuracy=True)
    counted = []
    # The second time, the projection is called.
    for called in (False, True):
        if called:
            model.decoder.core.project.register_forward_hook(lambda *_: None)
        assert (output_matrix(model) is None) == called
        found = step(model, ours, sample)
        assert_same(found, expected)
        counted.append([found[0][0][2][name] for name in ("n_correct", "total")])
    assert counted[0] == counted[1]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["vanilla_lm", "transformer_xl", "transformer_lm"])
def test_what_wraps_the_output_is_called_and_trained(arch: str, tied: bool) -> None:
    sample = batch()
    model: Any = small(arch, tied)
    kinds = LinearCrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion
    flags: dict[str, Any] = {"label_smoothing": 0.1, "report_accuracy": True}
    plain = float(step(model, criterion(kinds[0], **flags), sample)[0][0][0])
    owner, name = (model.decoder, "output_projection") if arch == "transformer_lm" else (model.decoder.core, "project")
    setattr(owner, name, adapter := Adapter(getattr(owner, name)))
    found, expected = (step(model, criterion(kind, **flags), sample) for kind in kinds)
    assert_same(found, expected)
    assert abs(float(found[0][0][0]) - plain) > 1e-3
    assert adapter.gain.grad


@pytest.mark.parametrize("smoothing", [0.1, 0.9])
def test_label_smoothing_spreads_a_share_over_all_other_symbols(smoothing: float) -> None:
    x, weight = (torch.randn(rows, 6, dtype=torch.float64, requires_grad=True) for rows in (23, 31))
    target = torch.randint(2, 31, (23,))
    target[::3] = padding = 1
    wanted = torch.full((23, 31), smoothing / 30, dtype=torch.float64).scatter_(1, target[:, None], 1.0 - smoothing)
    expected = -(wanted * F.linear(x, weight).log_softmax(1))[target != padding].sum()
    excess = above_mean(x, weight, target, padding).sum()
    found = module.linear_cross_entropy(x, weight, target, padding) + smoothing * 31 / 30 * excess
    pairs = (torch.autograd.grad(loss, (x, weight)) for loss in (found, expected))
    for one, other in zip((found, *next(pairs)), (expected, *next(pairs)), strict=True):
        # Rounding of sums over 6, 23 and 31 numbers, relative to the largest.
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-13 * float(other.detach().abs().max()))


@pytest.mark.parametrize("flags", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.3, "ignore_prefix_size": 5}])
def test_smoothing_accuracy_and_prefixes_are_those_of_label_smoothed_cross_entropy(flags: dict) -> None:
    model, sample = small("retina_lm", True), batch()
    flags = {**flags, "report_accuracy": True}
    ours, theirs = (
        criterion(kind, **flags) for kind in (LinearCrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion)
    )
    # Half of the targets are what the model finds most probable.
    guesses = model.eval()(**sample["net_input"])[0].argmax(-1)
    sample["target"][:, ::2] = guesses[:, ::2].where(sample["target"][:, ::2] != WORDS.pad(), WORDS.pad())
    found, expected = step(model, ours, sample), step(model, theirs, sample)
    assert 0 < expected[0][0][2]["n_correct"] < expected[0][0][2]["total"]
    assert_same(found, expected)
    each, other = (kind(model, sample, reduce=False)[0] for kind in (ours, theirs))
    torch.testing.assert_close(each, other.view(-1), rtol=1e-6, atol=1e-6, check_dtype=False)
    printed = []
    for kind, (returned, _) in ((ours, found), (theirs, expected)):
        with metrics.aggregate(new_root=True) as values:
            kind.reduce_metrics([logged for _, _, logged in returned] * 2)
        printed.append(values.get_smoothed_values())
    assert printed[0] == pytest.approx(printed[1])
    assert printed[0]["accuracy"] > 0


@pytest.mark.parametrize("arch", ["transformer_xl", "compressive_transformer", "transformer_ql"])
def test_streams_keep_their_memory_and_its_loss(arch: str) -> None:
    args = SimpleNamespace(sample_break_mode="eos", tokens_per_sample=None, data="")
    task = StreamingLanguageModelingTask(args, WORDS)
    model: Any = small(arch, True)
    task.model = model
    steps = []
    for kind in (LinearCrossEntropyCriterion, CrossEntropyCriterion):
        sums: list[Tensor] = []
        optimizer = SimpleNamespace(backward=lambda loss, sums=sums: (sums.append(loss.detach()), loss.backward()))
        model.zero_grad()
        torch.manual_seed(3)
        _, size, logged = task.train_step({**fixed(), "id": None}, model, criterion(kind), optimizer, 0)
        assert ("auxiliary_loss" in logged) == (arch == "compressive_transformer")
        logged = {"auxiliary_loss": 0.0, **logged}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        steps.append(([(sums[0], size, logged)], gradients))
    assert_same(*steps)


def fixed() -> dict[str, Any]:
    torch.manual_seed(5)
    return batch()


NEEDS = "--criterion linear_cross_entropy needs a model whose logits are its features times one matrix: got a "


def test_the_first_phase_of_haed_is_refused_at_the_first_batch() -> None:
    from tests.models.test_iem import first_phase

    with pytest.raises(UsageError, match=f"^{NEEDS}"):
        criterion(LinearCrossEntropyCriterion)(first_phase(2), batch())
