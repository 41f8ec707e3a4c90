"""The first phase: in-batch sampled softmax over chunks."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data import MonolingualDataset
from fairseq.logging import metrics

from fairseq_ms.core.hierarchical.chunks import unique_chunks
from fairseq_ms.core.hierarchical.iem import sampled_softmax
from fairseq_ms.criterions.in_batch_sampled_softmax import InBatchSampledSoftmax
from fairseq_ms.data.chunk_sampling import extended, predicted_chunks, random_blocks
from fairseq_ms.lm.base import NO_LIMIT
from fairseq_ms.models.haed import IEM_CRITERION, ImplicitEmbeddingModel
from tests.configs import haed as configs
from tests.references import hierarchical as references
from tests.references.hierarchical import Chunk
from tests.references.parts import weights_of
from tests.registry import build, dictionary


def random_flags(seed: int) -> dict[str, Any]:
    """A model of words, of which two tokens are encoded at most, so that chunks repeat."""
    flags = {**configs.random_flags(random.Random(seed)), "separators": None, "segmentation": "words"}
    flags |= {"decoder": "lstm", "local_layers": None, "local_attention_heads": None, "local_ffn_embed_dim": None}
    return {**flags, "max_segment_len": 2}


def first_phase(seed: int, symbols: int = 3, **wanted: object) -> ImplicitEmbeddingModel:
    """A random model of the first phase in float64, of few symbols."""
    torch.manual_seed(seed)
    flags = {**random_flags(seed), "init_std": 0.5, **wanted, "criterion": IEM_CRITERION}
    model = build("haed", flags, dictionary(symbols))
    assert isinstance(model, ImplicitEmbeddingModel)
    return model.double()


def tokens_with_repetitions(rows: int, length: int, symbols: int = 3) -> torch.Tensor:
    tokens = torch.randint(4, 4 + symbols, (rows, length))
    tokens[torch.rand(tokens.shape) < 0.3] = 2
    return tokens


def without_padding(tokens_BT: torch.Tensor) -> list[list[int]]:
    return [row[row != 1].tolist() for row in tokens_BT]


def chunks_of(tokens_BT: torch.Tensor) -> list[Chunk]:
    """Those that are predicted, of at most two tokens, in reading order; 2 ends a word."""
    rows = [references.whole_chunks_of(row, {"max_segment_len": 2}, {2}) for row in without_padding(tokens_BT)]
    return [chunk for chunks in rows for chunk in chunks[1:]]


def padded(chunks: list[Chunk], longest: int) -> torch.Tensor:
    return torch.tensor([[*chunk] + [1] * (longest - len(chunk)) for chunk in chunks]).view(-1, longest)


def test_equation_4_is_the_default_and_a_projection_is_asked_for_by_name() -> None:
    sizes = {"decoder_embed_dim": 16, "position_embed_dim": 6, "criterion": IEM_CRITERION}
    assert build("haed", sizes, dictionary(5)).query is None
    projected = build("haed", {**sizes, "query": "linear"}, dictionary(5)).query
    assert tuple(projected.weight.shape) == (10, 16)


@pytest.mark.parametrize("width", [0, 6])
def test_both_phases_have_one_longest_text(width: int) -> None:
    sizes = {"decoder_embed_dim": 16, "position_embed_dim": width}
    phases = [build("haed", {**sizes, "criterion": name}, dictionary(5), 64) for name in ("any", IEM_CRITERION)]
    assert {phase.max_positions() for phase in phases} == {64 if width else NO_LIMIT}


@pytest.mark.parametrize("seed", range(6))
def test_loss_and_gradients_equal_a_double_loop_with_duplicates(seed: int) -> None:
    query = ("none", "linear")[seed % 2]
    model = first_phase(seed, query=query)
    tokens = tokens_with_repetitions(3, 11)
    tokens[1, 7:] = 1
    further, own = chunks_of(tokens_with_repetitions(4, 9)), chunks_of(tokens)
    assert len({*own, *further}) < len(own + further), "there are duplicates to be masked"

    assert torch.equal(predicted_chunks(model.segmentation, tokens), padded(own, 2)), "they come in reading order"
    distinct, _, counts = unique_chunks(padded(own + further, 2))
    found = model(tokens, distinct, counts)
    loss, ranks, negatives = references.first_phase_loss(
        weights_of(model), {**random_flags(seed), "query": query}, {2}, without_padding(tokens), further
    )
    torch.testing.assert_close(found.loss, loss, rtol=1e-12, atol=1e-12)
    assert found.rank_X.tolist() == ranks
    assert found.negatives_X.tolist() == negatives
    parameters = list(model.parameters())
    ours = torch.autograd.grad(found.loss, parameters, allow_unused=True)
    theirs = torch.autograd.grad(loss, parameters, allow_unused=True)
    for (name, parameter), one, other in zip(model.named_parameters(), ours, theirs, strict=True):
        assert one is not None, f"{name} has no gradient, which distributed training does not allow"
        expected = torch.zeros_like(parameter) if other is None else other
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_encodings_that_are_all_the_same_rank_no_positive_first() -> None:
    found = sampled_softmax(
        torch.randn(3, 4), torch.tensor([0, 1, 1]), torch.zeros(5, 4), torch.tensor([1, 2, 3, 0, 1])
    )
    assert found.rank_X.tolist() == [3, 3, 3]


class Blocks:
    """What a ``TokenBlockDataset`` gives: source and target of each block."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self.sizes = [tokens.shape[1] - 1] * tokens.shape[0]

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, None]:
        return self.tokens[index, :-1], self.tokens[index, 1:], None


def small_task(symbols: int = 3, blocks: int = 40, bos: bool = False) -> SimpleNamespace:
    words = dictionary(symbols)
    data = Blocks(tokens_with_repetitions(blocks, 12, symbols))

    class FutureTargets(MonolingualDataset):
        def __getitem__(self, index: int) -> dict:
            source, target, _ = self.dataset[index]
            source, target = self._maybe_add_bos(source, target)
            return {"id": index, "source": source, "target": target}

    train = FutureTargets(data, data.sizes, words, words, False, False, ["future"], bos)
    return SimpleNamespace(source_dictionary=words, target_dictionary=words, datasets={"train": train})


def criterion(task: SimpleNamespace, **flags: Any) -> InBatchSampledSoftmax:
    known: dict[str, Any] = {
        "negative_batches": 0,
        "seed": 5,
    }
    return InBatchSampledSoftmax(task, **{**known, **flags})


def batch(task: SimpleNamespace, indices: list[int]) -> dict:
    train = task.datasets["train"]
    return train.collater([train[index] for index in indices])


def test_negatives_are_a_function_of_seed_update_and_row() -> None:
    task = small_task()
    model = first_phase(1)
    sample = batch(task, [3, 7])

    def drawn(update: int, sample: dict = sample, seed: int = 5) -> torch.Tensor:
        model.train().set_num_updates(update)
        return criterion(task, negative_batches=3, seed=seed)._drawn(model, sample)

    first = drawn(8)
    assert torch.equal(first, drawn(8))
    for other in (drawn(9), drawn(8, batch(task, [3, 8])), drawn(8, seed=6)):
        assert not torch.equal(first, other)
    apart = [drawn(8, batch(task, [row])) for row in (3, 7)]
    assert torch.equal(first, torch.cat(apart)), "however rows are spread over batches and processes"
    model.eval()
    with torch.no_grad():
        scores = [float(criterion(task, negative_batches=3)(model, sample)[0]) for _ in range(2)]
        model.set_num_updates(400)
        scores.append(float(criterion(task, negative_batches=3)(model, sample)[0]))
    assert len(set(scores)) == 1, "validation draws the same negatives every time"


def test_further_batches_are_as_many_random_blocks_of_the_training_data() -> None:
    task = small_task()
    blocks = random_blocks(task.datasets["train"], 6, [[1, 2, 3]], 1)
    rows = {tuple(row) for row in task.datasets["train"].dataset.tokens.tolist()}
    assert blocks.shape == (6, 12)
    assert all(tuple(row) in rows for row in blocks.tolist())
    model = first_phase(1, segmentation="fixed", max_segment_len=1)
    logged = criterion(task, negative_batches=3)(model, batch(task, [0, 1]))[2]
    sample = batch(task, [0, 1])
    _, size, alone = criterion(task)(model, sample)
    # Chunks of one token: every target is a chunk, the last one included.
    assert size == sample["ntokens"] == alone["sample_size"]
    # 2 rows of 11 chunks and 3 times as many; those that spell the positive are fewer than all
    assert alone["negatives"] < logged["negatives"] <= 22 * (4 * 22)


@pytest.mark.parametrize("query", ["none", "linear"])
def test_chunks_of_further_batches_are_candidates_of_the_criterions_loss(query: str) -> None:
    task, model = small_task(), first_phase(1, query=query).eval()
    phase, sample = criterion(task, negative_batches=3), batch(task, [3, 7])
    loss, size, _ = phase(model, sample)
    rows = extended(sample["net_input"]["src_tokens"], sample["target"], 1)
    flags = {**random_flags(1), "query": query}
    further = [tuple(chunk) for chunk in without_padding(phase._drawn(model, sample))]
    expected, ranks, _ = references.first_phase_loss(weights_of(model), flags, {2}, without_padding(rows), further)
    assert size == len(ranks)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0.0)


def test_random_blocks_begin_as_those_of_a_batch_do() -> None:
    task = small_task(bos=True)
    train = task.datasets["train"]
    rows = {tuple(extended(train[n]["source"][None], train[n]["target"][None], 1)[0].tolist()) for n in range(40)}
    assert {tuple(row) for row in random_blocks(train, 6, [[1, 2, 3]], 1).tolist()} <= rows


def test_a_row_of_words_of_one_token_has_room() -> None:
    sizes = {"decoder_layers": 1, "decoder_ffn_embed_dim": 4, "decoder_attention_heads": 1, "attention_head_dim": 2}
    sizes |= {"decoder_embed_dim": 8, "position_embed_dim": 2, "encoder_units": 4, "token_embed_dim": 3}
    model = build("haed", {"criterion": IEM_CRITERION, **sizes}, dictionary(3), positions=12)
    # The end of a sentence is a word by itself, and the last target is read as well.
    tokens = torch.full((1, 13), 2)
    distinct, _, counts = unique_chunks(predicted_chunks(model.segmentation, tokens))
    found = model(tokens, distinct, counts)
    assert found.rank_X.numel() == 12


def test_bits_shares_and_negatives_are_those_of_a_chunk_whatever_the_batches() -> None:
    logged = [
        {"loss": 8.0, "sample_size": 6, "top1": 1, "top5": 3, "negatives": 50},
        {"loss": 3.0903549, "sample_size": 2, "top1": 1, "top5": 2, "negatives": 10},
    ]
    with metrics.aggregate(new_root=True) as found:
        InBatchSampledSoftmax.reduce_metrics(logged)
    # 11.0903549 nats are 16 bits, of 8 chunks.
    assert found.get_smoothed_values() == {"loss": 2.0, "top1": 25.0, "top5": 62.5, "negatives": 7.5}
    with metrics.aggregate(new_root=True) as found:
        # A batch that is longer counts for more.
        InBatchSampledSoftmax.reduce_metrics(logged[:1])
        InBatchSampledSoftmax.reduce_metrics(logged[1:])
    assert found.get_smoothed_values() == {"loss": 2.0, "top1": 25.0, "top5": 62.5, "negatives": 7.5}


def test_batches_without_a_chunk_to_predict_are_logged_as_zeros() -> None:
    with metrics.aggregate(new_root=True) as found:
        InBatchSampledSoftmax.reduce_metrics(
            [{"loss": 0.0, "sample_size": 0, "top1": 0, "top5": 0, "negatives": 0}, {}]
        )
    assert found.get_smoothed_values() == {"loss": 0.0, "top1": 0.0, "top5": 0.0, "negatives": 0.0}


def test_negatives_come_from_the_training_data_whatever_their_name() -> None:
    valid, train = small_task(blocks=5).datasets["train"], small_task(blocks=30).datasets["train"]
    task = small_task()
    task.datasets = {"valid": valid, "train_half": train}
    assert criterion(task, train_subset="train_half")._dataset() is train
    # fairseq-validate loads no training data.
    task.datasets = {"valid": valid}
    assert criterion(task)._dataset() is valid
