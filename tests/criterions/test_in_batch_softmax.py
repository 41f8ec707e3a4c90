"""The first phase's criterion: its defaults, the correction by frequencies, and what it logs of several batches."""

import torch
from fairseq.logging import metrics

from fairseq_ms.criterions.in_batch_sampled_softmax import InBatchSampledSoftmax
from fairseq_ms.data.chunk_sampling import ChunkFrequencies, random_blocks
from tests.models.test_iem import batch, criterion, first_phase, small_task


def test_frequencies_are_counted_once_for_a_dataset_and_subtracted_from_the_scores() -> None:
    task, model = small_task(blocks=90), first_phase(2)
    corrected = criterion(task, log_q_correction="unigram", log_q_blocks=70)
    sample = batch(task, [1, 2, 3])
    assert not torch.isclose(corrected(model, sample)[0], criterion(task)(model, sample)[0])
    counted = corrected._frequencies(model.segmentation, torch.device("cpu"))
    # Seventy blocks, at most 64 of them at a time; 2 is the second use of the seed, which is 5.
    blocks = [random_blocks(task.datasets["train"], count, [[5, 2, start]], 1) for start, count in ((0, 64), (64, 6))]
    expected = ChunkFrequencies(model.segmentation, blocks)
    assert (counted.counts, counted.total) == (expected.counts, expected.total)
    assert corrected._frequencies(model.segmentation, torch.device("cpu")) is counted
    task.datasets["train"] = small_task(blocks=5).datasets["train"]
    assert corrected._frequencies(model.segmentation, torch.device("cpu")).counts != counted.counts


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
