"""The first phase's criterion: where negatives come from, and what it logs of several batches."""

from fairseq.logging import metrics

from fairseq_ms.criterions.in_batch_sampled_softmax import InBatchSampledSoftmax
from tests.models.test_iem import criterion, small_task


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
