"""A corpus as parallel streams of segments, in the order of time and without leaving out a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset
from torch import Tensor


class Corpus(FairseqDataset):
    """The tokens of a split, one after the other.

    Args:
        sentences: fairseq's dataset of lines, each a tensor of tokens
        sizes: their lengths
        eos: the symbol that stands before the first token
    """

    def __init__(self, sentences: Sequence[Tensor], sizes: Any, eos: int) -> None:
        self.sentences = sentences
        self.eos = eos
        self.offsets = np.concatenate([[0], np.asarray(sizes, dtype=np.int64).cumsum()])

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self.offsets[-1])

    def tokens(self, start: int, end: int) -> Tensor:
        """Tokens start .. end - 1; position -1, before the first, is an end-of-sentence symbol."""
        pieces = [torch.tensor([self.eos])] if start < 0 else []
        start = max(start, 0)
        line = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while start < end:
            offset, stop = int(self.offsets[line]), min(end, int(self.offsets[line + 1]))
            pieces.append(self.sentences[line][start - offset : stop - offset])
            start, line = stop, line + 1
        return torch.cat(pieces).long() if pieces else torch.zeros(0, dtype=torch.long)


class StreamBatches(FairseqDataset):
    """Batches of consecutive segments: row r of one batch is continued by row r of the next.

    The segments of the corpus, of which the last may be shorter, are dealt out in order, a run of them to every stream,
    and every one to exactly one stream. Item ``step * shards + shard`` is the batch of a shard, fairseq's order of
    sharded batches.

    Args:
        corpus: the tokens
        segment: segment length n_s
        streams: streams of a shard, the batch size
        shards: how many shards, the data parallel world size
        warm_up: segments before a stream's own that it reads first, without scoring them. With as many as the model's
            memory reaches back, a score depends on the corpus alone and not on how it was dealt out.
        together: segments of a row in one batch
        pad: the padding symbol
    """

    def __init__(
        self,
        corpus: Corpus,
        segment: int,
        streams: int,
        shards: int = 1,
        warm_up: int = 0,
        together: int = 1,
        pad: int = 1,
    ) -> None:
        self.corpus = corpus
        self.segment = segment
        self.streams = streams
        self.shards = shards
        self.together = together
        self.pad = pad
        everything, rows = -(-len(corpus) // segment), streams * shards
        share, extra = divmod(everything, rows)
        self.bounds = [row * share + min(row, extra) for row in range(rows + 1)]
        self.begins = [max(bound - warm_up, 0) if bound < everything else bound for bound in self.bounds[:-1]]
        longest = max(end - begin for begin, end in zip(self.begins, self.bounds[1:]))
        self.steps = -(-longest // together)

    def __len__(self) -> int:
        return self.steps * self.shards

    def layout(self) -> dict[str, int]:
        """The sizes that determine which place of the corpus a step reads."""
        rows = self.streams * self.shards
        # Corpora of checkpoints could once consist of documents, at whose beginnings memories were emptied.
        return {"tokens": len(self.corpus), "segment": self.segment, "streams": rows, "documents": 1}

    def ordered_indices(self) -> np.ndarray:
        """The items in the order of time."""
        return np.arange(len(self))

    def num_tokens(self, item: int) -> int:
        """How many tokens of an item are scored."""
        step, shard = divmod(int(item), self.shards)
        found = 0
        for stream in range(shard * self.streams, (shard + 1) * self.streams):
            first = self.begins[stream] + step * self.together
            begin, end = max(first, self.bounds[stream]), min(first + self.together, self.bounds[stream + 1])
            found += max(0, min(end * self.segment, len(self.corpus)) - begin * self.segment)
        return found

    def batch_by_size(self, indices: np.ndarray, **limits: Any) -> list[np.ndarray]:
        """fairseq's hook: each item by itself, since it is a batch already."""
        return np.split(indices, len(indices))

    def __getitem__(self, item: int) -> dict[str, Any]:
        """The batch of one step of one shard, a fairseq sample; "stream" says which step."""
        step, shard = divmod(int(item), self.shards)
        length = self.together * self.segment
        source = torch.full((self.streams, length), self.pad)
        target = torch.full((self.streams, length), self.pad)
        lengths = torch.zeros(self.streams, dtype=torch.long)
        # Where the scored tokens of a row begin, which is what fairseq's scorer wants to know.
        unscored = torch.zeros(self.streams, dtype=torch.long)
        scored = 0
        for row in range(self.streams):
            stream = shard * self.streams + row
            for place in range(self.together):
                index = self.begins[stream] + step * self.together + place
                if index >= self.bounds[stream + 1]:
                    break
                start = index * self.segment
                at, count = place * self.segment, min(self.segment, len(self.corpus) - start)
                tokens = self.corpus.tokens(start - 1, start + count)
                source[row, at : at + count] = tokens[:-1]
                lengths[row] = at + count
                if index >= self.bounds[stream]:
                    target[row, at : at + count] = tokens[1:]
                    scored += count
                else:
                    unscored[row] = at + count
        return {
            "id": torch.arange(shard * self.streams, (shard + 1) * self.streams),
            "nsentences": self.streams,
            "ntokens": scored,
            "net_input": {"src_tokens": source, "src_lengths": lengths},
            "target": target,
            "start_indices": unscored,
            "stream": {"step": step},
        }

    @staticmethod
    def collater(samples: list[dict[str, Any]]) -> dict[str, Any]:
        """An item is a batch already."""
        (batch,) = samples
        return batch
