"""How a corpus is dealt out to streams: every token once, in the order of time, whatever the batch."""

import random

import pytest
import torch

from fairseq_ms.data.streams import Corpus, StreamBatches

PAD, EOS = 1, 2


def random_corpus(rng: random.Random) -> Corpus:
    """Lines that end in EOS, some of them empty; every other token is its own position."""
    lines, count = [], 0
    for _ in range(rng.randint(1, 30)):
        length = rng.choice([1, 1, 2, 5, 9])
        lines.append(torch.tensor([*range(count + 10, count + 9 + length), EOS], dtype=torch.int32))
        count += length
    return Corpus(lines, [len(line) for line in lines], EOS)


def random_batches(rng: random.Random, corpus: Corpus, **settings: int) -> StreamBatches:
    chosen = {"streams": rng.randint(1, 7), "shards": rng.randint(1, 3), "warm_up": rng.randint(0, 3)}
    return StreamBatches(corpus, rng.randint(1, 6), **{**chosen, **settings})


def all_tokens(corpus: Corpus) -> torch.Tensor:
    return torch.cat([line.long() for line in corpus.sentences])


def rows_of(batches: StreamBatches, name: str) -> dict[int, list[torch.Tensor]]:
    """What every stream reads or is scored on, batch after batch."""
    rows: dict[int, list[torch.Tensor]] = {}
    for item in range(len(batches)):
        batch = batches[item]
        for stream, row in zip(batch["id"].tolist(), batch["target"] if name == "target" else batch["net_input"][name]):
            rows.setdefault(stream, []).append(row)
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_any_range_of_a_corpus_is_what_its_lines_say(seed: int) -> None:
    rng = random.Random(seed)
    corpus = random_corpus(rng)
    everything = torch.cat([torch.tensor([EOS]), all_tokens(corpus)])
    start = rng.randint(-1, len(corpus) - 1)
    end = rng.randint(start, len(corpus))
    assert corpus.tokens(start, end).tolist() == everything[start + 1 : end + 1].tolist()


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_a_target_exactly_once_and_in_order_after_the_one_before(seed: int) -> None:
    rng = random.Random(seed)
    corpus = random_corpus(rng)
    batches = random_batches(rng, corpus, together=rng.randint(1, 3))
    rows = rows_of(batches, "target")
    targets = torch.cat([torch.cat(rows[stream]) for stream in sorted(rows)])
    assert targets[targets != PAD].tolist() == all_tokens(corpus).tolist()
    counted = sum(batches[item]["ntokens"] for item in range(len(batches)))
    assert counted == len(corpus)
    # Each is read after the token before it.
    sources = rows_of(batches, "src_tokens")
    read = torch.cat([torch.cat(sources[stream]) for stream in sorted(sources)])
    assert read[targets != PAD].tolist() == [EOS, *all_tokens(corpus).tolist()[:-1]]


@pytest.mark.parametrize("seed", range(40))
def test_a_warmed_up_stream_first_reads_what_comes_before_it_on_the_same_grid(seed: int) -> None:
    rng = random.Random(seed)
    corpus = random_corpus(rng)
    warm_up = rng.randint(1, 3)
    batches = random_batches(rng, corpus, warm_up=warm_up)
    single = StreamBatches(corpus, batches.segment, 1)
    alone = torch.cat(rows_of(single, "src_tokens")[0])
    for stream, pieces in rows_of(batches, "src_tokens").items():
        first, last = batches.bounds[stream], batches.bounds[stream + 1]
        begin = max(0, first - warm_up) if first < single.bounds[-1] else first
        read = torch.cat(pieces)[: (last - begin) * batches.segment]
        assert read.tolist() == alone[begin * batches.segment : last * batches.segment].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_scored_tokens_of_a_row_begin_where_the_sample_says(seed: int) -> None:
    rng = random.Random(seed)
    batches = random_batches(rng, random_corpus(rng), together=rng.randint(1, 3), warm_up=rng.randint(1, 4))
    for item in range(len(batches)):
        sample = batches[item]
        assert batches.num_tokens(item) == sample["ntokens"]
        for target, start in zip(sample["target"], sample["start_indices"].tolist()):
            scored = (target != PAD).nonzero().flatten().tolist()
            assert not scored or scored == list(range(start, start + len(scored)))
