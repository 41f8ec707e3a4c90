"""The task that carries memories: from batch to batch, over a resume, and through an evaluation."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary, iterators
from torch.nn import functional as F

from fairseq_ms.data.streams import Corpus
from fairseq_ms.errors import UsageError
from fairseq_ms.tasks.streaming_language_modeling import StreamingLanguageModelingTask
from tests.helpers import trained
from tests.helpers.dropout import drop_nothing
from tests.helpers.seeds import seeds
from tests.registry import Case, build, dictionary, random_case

ARCHS = ["transformer_xl", "compressive_transformer", "transformer_ql"]
# float64: another batch size is another order of summation.
EXACT = 1e-9


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"sample_break_mode": "none", "tokens_per_sample": None, "data": "", **changes})


def make(arch: str, seed: int, tokens: int = 157) -> tuple[StreamingLanguageModelingTask, Case]:
    """A task with a random model in float64 and a corpus of random lines."""
    case = random_case(arch, seed)
    case.model.double()
    task = StreamingLanguageModelingTask(arguments(), case.dictionary)
    task.model = case.model
    lines, left = [], tokens
    while left:
        length = min(left, case.rng.choice([1, 4, 9, 14]))
        lines.append(torch.cat([case.tokens(1, length - 1)[0], torch.tensor([case.dictionary.eos()])]))
        left -= length
    for split in ("train", "valid"):
        task.datasets[split] = Corpus(lines, [len(line) for line in lines], case.dictionary.eos())
    return task, case


def batches_of(task: StreamingLanguageModelingTask, split: str, streams: int, **more: Any) -> Any:
    training = {"grouped_shuffling": False} if split == "train" else {}
    iterator = task.get_batch_iterator(task.dataset(split), max_sentences=streams, **training, **more)
    return iterator.next_epoch_itr(shuffle=True)


def log_prob(model: Any, sample: dict) -> torch.Tensor:
    """Sum of the log-probabilities of a sample's targets."""
    logits = model(**sample["net_input"])[0]
    target = sample["target"].flatten()
    return -F.cross_entropy(logits.flatten(0, 1), target, ignore_index=1, reduction="sum")


def evaluate(task: StreamingLanguageModelingTask, streams: int, **more: Any) -> float:
    total, scored = 0.0, 0
    with torch.no_grad():
        for sample in task.eval_lm_dataloader(task.dataset("valid"), batch_size=streams, **more):
            total += float(log_prob(task.model, sample))
            scored += int(sample["target"].ne(1).sum())
    assert scored == len(task.dataset("valid"))
    return total


@pytest.mark.parametrize("seed", seeds(3, 8))
@pytest.mark.parametrize("arch", ARCHS)
def test_the_score_of_a_corpus_is_that_of_reading_it_in_one_go(arch: str, seed: int) -> None:
    task, case = make(arch, seed)
    corpus = task.dataset("valid")
    text = corpus.tokens(0, len(corpus))
    source = torch.cat([torch.tensor([case.dictionary.eos()]), text[:-1]])[None]
    with torch.no_grad():
        expected = -float(F.cross_entropy(case.model(source)[0][0], text, reduction="sum"))
    for settings in ({"streams": 1}, {"streams": 3, "max_tokens": 60}, {"streams": 40}):
        assert evaluate(task, **settings) == pytest.approx(expected, rel=EXACT)
    segment = case.model.decoder.core.segment_len
    with pytest.raises(
        UsageError, match=f"^--max-tokens must be .*--tokens-per-sample {segment},.*: got {segment - 1}$"
    ):
        evaluate(task, 1, max_tokens=segment - 1)


class _Criterion:
    """Adds up what a model says, so that memories show."""

    def __init__(self) -> None:
        self.scores: list[float] = []

    def __call__(self, model: Any, sample: dict) -> tuple[torch.Tensor, int, dict]:
        loss = -log_prob(model, sample)
        self.scores.append(loss.item())
        return loss, sample["ntokens"], {"loss": loss.detach()}


class _Optimizer:
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        """As under ``--amp`` after an overflow, which changes no weight."""


def without_dropout(case: Case) -> None:
    drop_nothing(case.model)
    case.model.decoder.core.droppath = 0.0


def train(task: StreamingLanguageModelingTask, sample: dict) -> float:
    criterion = _Criterion()
    task.train_step(sample, task.model, criterion, _Optimizer(), 0)
    return criterion.scores[0]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", seeds(2, 4))
def test_training_carries_its_memory_and_validation_in_between_does_not_touch_it(arch: str, seed: int) -> None:
    task, case = make(arch, seed)
    without_dropout(case)
    plain = [train(task, sample) for sample in batches_of(task, "train", 3)]
    assert plain == [train(task, sample) for sample in batches_of(task, "train", 3)], "an epoch begins empty"
    mixed = []
    for step, sample in enumerate(batches_of(task, "train", 3)):
        mixed.append(train(task, sample))
        if step % 2:
            for other in batches_of(task, "valid", 2):
                task.valid_step(other, task.model, _Criterion())
            # As fairseq does before training goes on.
            case.model.train()
    assert mixed == plain
    # What one stream alone is scored over its whole length is what its rows were scored.
    whole = [train(task, sample) for sample in batches_of(task, "train", 1)]
    assert sum(whole) == pytest.approx(-evaluate(task, 1), rel=EXACT)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", seeds(2, 4))
@pytest.mark.parametrize("shards", [{}, {"num_shards": 2, "shard_id": 1}])
def test_a_memory_that_nobody_saved_is_rebuilt_from_the_tokens_before(
    shards: dict[str, int], arch: str, seed: int
) -> None:
    task, case = make(arch, seed)
    without_dropout(case)
    samples = list(batches_of(task, "train", 2, **shards))
    scores = [train(task, sample) for sample in samples]
    task._dealt.clear()
    batches_of(task, "train", 2, **shards)
    middle = len(samples) // 2
    assert [train(task, sample) for sample in samples[middle:]] == pytest.approx(scores[middle:], rel=EXACT)
    # A batch that is shown again is given the same memory again.
    assert train(task, samples[-1]) == pytest.approx(scores[-1], rel=EXACT)


@pytest.mark.parametrize("arch", ARCHS)
def test_an_update_that_is_tried_again_begins_with_the_memory_that_it_began_with(arch: str) -> None:
    """As ``--amp`` tries it after an overflow, with all batches of ``--update-freq``."""
    task, case = make(arch, 1)
    without_dropout(case)
    batches = iterators.GroupedIterator(batches_of(task, "train", 2), 3)

    def attempt(samples: list[dict]) -> list[float]:
        scores = [train(task, sample) for sample in samples]
        task.optimizer_step(_Optimizer(), case.model, 0)
        return scores

    attempt(next(batches))
    with torch.no_grad():
        # Memories made with the weights of now would be others.
        for weight in case.model.parameters():
            weight.mul_(1.5)
    # The second update is given up after three attempts, and the next one begins without a step between them.
    for samples in (next(batches), next(batches)):
        first = attempt(samples)
        assert attempt(samples) == attempt(samples) == first


@pytest.mark.parametrize("arch", ARCHS)
def test_a_checkpoint_carries_the_memory_bit_for_bit_and_loads_safely(arch: str) -> None:
    task, case = make(arch, 1)
    without_dropout(case)
    samples = list(batches_of(task, "train", 2))
    scores = [train(task, sample) for sample in samples[:-2]]
    buffer = io.BytesIO()
    torch.save(task.get_checkpoint_dict(), buffer)
    scores += [train(task, sample) for sample in samples[-2:]]
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)["StreamingLanguageModelingTask"]
    task._dealt.clear()
    batches_of(task, "train", 2)
    task.set_checkpoint_dict(saved)
    assert [train(task, sample) for sample in samples[-2:]] == scores[-2:]
    task._dealt.clear()
    batches_of(task, "train", 3)
    with pytest.raises(ValueError, match="--batch-size times ranks must be as in the checkpoint"):
        task.set_checkpoint_dict(saved)
    # A finished epoch binds nothing.
    task.set_checkpoint_dict({**saved, "finished": True})
    assert task.carried[True].memory is None
    task._dealt.clear()
    batches_of(task, "train", 1, num_shards=2, shard_id=1)
    task.set_checkpoint_dict(saved)
    assert task.carried[True].memory is None, "another shard's memory was taken"
    # The same streams over another number of ranks: the one that saved has only some of them now.
    task._dealt.clear()
    halves = list(batches_of(task, "train", 1, num_shards=2, shard_id=0))
    scores = [train(task, sample) for sample in halves]
    task._dealt.clear()
    batches_of(task, "train", 1, num_shards=2, shard_id=0)
    task.set_checkpoint_dict(saved)
    assert [train(task, sample) for sample in halves[-2:]] == pytest.approx(scores[-2:], rel=EXACT)


@pytest.mark.parametrize("arch", ARCHS)
def test_datasets_that_are_read_once_leave_nothing_behind(arch: str) -> None:
    task, _ = make(arch, 1)
    for disabled in (True, False):
        for _ in range(2):
            list(batches_of(task, "train", 2, disable_iterator_cache=disabled))
        assert len(task._dealt) == len(task.dataset_to_epoch_iter) == 1 - disabled


def test_lines_of_their_own_train_the_compression_as_well() -> None:
    flags = {"tokens_per_sample": 4, "mem_len": 2, "compressed_mem_len": 2, "compression_rate": 2}
    words = dictionary(9)
    model = build("compressive_transformer", {"decoder_embed_dim": 8, "decoder_attention_heads": 2, **flags}, words)
    task = StreamingLanguageModelingTask(arguments(sample_break_mode="eos"), words)
    task.model = model
    tokens = torch.randint(4, 13, (2, 15))
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": None}, "target": tokens, "ntokens": 30}
    logged = task.train_step(sample, model, _Criterion(), _Optimizer(), 0)[2]
    assert float(logged["auxiliary_loss"]) > 0.0
    assert all(weight.grad.abs().sum() > 0 for weight in model.decoder.core.compress.parameters())
    # Processes add up their statistics by position: a batch without a whole segment has to log the same ones.
    short = {"net_input": {"src_tokens": tokens[:, :3], "src_lengths": None}, "target": tokens[:, :3], "ntokens": 6}
    found = task.train_step(short, model, _Criterion(), _Optimizer(), 0)[2]
    assert list(found) == list(logged)
    assert float(found["auxiliary_loss"]) == 0.0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("update_freq", [1, 3])
def test_batches_come_in_the_order_of_time(workers: int, update_freq: int) -> None:
    task, _ = make("transformer_xl", 5)
    batches = batches_of(task, "train", 2, num_workers=workers, data_buffer_size=2)
    groups = list(iterators.GroupedIterator(batches, update_freq))
    steps = [sample["stream"]["step"] for group in groups for sample in group]
    assert steps == list(range(task.carried[True].batches.steps))
    assert all(len(group) == update_freq for group in groups[:-1])


@pytest.mark.parametrize(
    ("arch", "changes", "sentence"),
    [
        ("transformer_xl", {"mem_len": 5}, "--mem-len must be as in the checkpoint .*[(]3[)]"),
        ("compressive_transformer", {"mem_len": 5}, "--mem-len must be as in the checkpoint .*[(]3[)]"),
        ("compressive_transformer", {"compressed_mem_len": 5}, "--compressed-mem-len must be as in the checkpoint"),
        ("transformer_ql", {"mem_len": 5}, "--mem-len must be as in the checkpoint"),
        ("transformer_ql", {"scale_layers": "1x=1,4x=1"}, "--scale-layers must be as in the checkpoint"),
    ],
)
def test_another_memory_within_an_epoch_is_refused_by_the_flag_that_changed_it(
    arch: str, changes: dict[str, Any], sentence: str
) -> None:
    flags_by_arch: dict[str, dict[str, Any]] = {
        "transformer_xl": {},
        "compressive_transformer": {"compressed_mem_len": 3, "compression_rate": 2},
        "transformer_ql": {"scale_layers": "1x=1,2x=1", "output_layers": 1, "decoder_normalize_before": True},
    }
    task, _ = make("transformer_xl", 1)
    task.args.tokens_per_sample = 4
    sizes: dict[str, Any] = {"decoder_embed_dim": 8, "decoder_attention_heads": 2, "tokens_per_sample": 4, "mem_len": 3}
    sizes |= flags_by_arch[arch]

    def begin(**changes: Any) -> Any:
        task._dealt.clear()
        task.model = build(arch, {**sizes, **changes}, task.dictionary)
        return list(batches_of(task, "train", 2))

    for sample in begin()[:3]:
        train(task, sample)
    saved = task.get_checkpoint_dict()["StreamingLanguageModelingTask"]
    begin()
    task.set_checkpoint_dict(saved)
    begin(**changes)
    with pytest.raises(ValueError, match=f"^{sentence}.*--reset-dataloader, checkpoint.reset_dataloader=true.*: got"):
        task.set_checkpoint_dict(saved)
    # A finished epoch binds nothing.
    task.set_checkpoint_dict({**saved, "finished": True})


@pytest.mark.parametrize(("before", "after"), [("none", "eos"), ("eos", "none")])
def test_another_break_mode_within_an_epoch_is_refused(before: str, after: str, tmp_path: Path) -> None:
    data = trained.write_corpus(tmp_path, {"train": trained.random_lines(3, 40)})
    words = Dictionary.load(str(data / "dict.txt"))
    model = build("transformer_xl", {"tokens_per_sample": 8}, words)

    def resumed(mode: str, *saved: Any) -> tuple[StreamingLanguageModelingTask, Any]:
        task = StreamingLanguageModelingTask(arguments(sample_break_mode=mode, data=str(data)), words)
        task.args.dataset_impl = None
        task.model = model
        task.load_dataset("train")
        iterator = task.get_batch_iterator(task.dataset("train"), max_sentences=2, grouped_shuffling=False)
        if saved:
            position, state = saved
            iterator.load_state_dict(position)
            task.set_checkpoint_dict(state)
        return task, iterator

    task, iterator = resumed(before)
    batches = iterator.next_epoch_itr()
    for _ in range(3):
        next(batches)
    state = task.get_checkpoint_dict()["StreamingLanguageModelingTask"]
    resumed(before, iterator.state_dict(), state)
    sentence = f"^--sample-break-mode must be as in the checkpoint to continue its epoch .{before}., .*: got {after}$"
    with pytest.raises(ValueError, match=sentence):
        resumed(after, iterator.state_dict(), state)
    list(batches)
    # A finished epoch binds nothing.
    resumed(after, iterator.state_dict(), {**state, "finished": True})


def test_a_checkpoint_of_a_corpus_with_documents_is_refused_within_its_epoch_and_others_go_on() -> None:
    task, _ = make("transformer_xl", 1)
    list(batches_of(task, "train", 2))
    saved = task.get_checkpoint_dict()["StreamingLanguageModelingTask"]
    task.set_checkpoint_dict({**saved, "layout": {**saved["layout"], "segments": 40}})
    with pytest.raises(ValueError, match=r"^documents must be as in the checkpoint"):
        task.set_checkpoint_dict({**saved, "layout": {**saved["layout"], "documents": 7}})
