"""The memory of a corpus' streams on its way from one batch to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn

from fairseq_ms.core.stream_state import Memory
from fairseq_ms.data.streams import StreamBatches
from fairseq_ms.errors import UsageError
from fairseq_ms.lm import older_names

# What a layout calls the places of a step, and which flags set their number.
_FLAGS = {
    "tokens": "the data",
    "segment": "--tokens-per-sample",
    "streams": "--batch-size times ranks",
}


def cannot_continue(flag: str, then: Any, now: Any) -> UsageError:
    """The UsageError for resuming within an epoch with other batches than the checkpoint's."""
    return UsageError(
        f"{flag} must be as in the checkpoint to continue its epoch ({then}), or use --reset-dataloader, "
        f"checkpoint.reset_dataloader=true, to begin a new one: got {now}"
    )


class CarriedMemory:
    """Gives every batch of a stream the memory that the batch before it left.

    Attributes:
        batches: where the batches come from
        reach: how many segments back a memory can depend on
        flags: what the memory's form depends on, as the user gave it
        step: the step that ``memory`` belongs to
        begun: the step that the update in progress began with, and its memory
        between_updates: whether the next batch begins an update, or is the first one of the same again
        gathered: memories of other shards by their number, for a checkpoint that is about to be written
    """

    def __init__(self, batches: StreamBatches, reach: int, shard: int, flags: dict[str, Any]) -> None:
        self.batches = batches
        self.reach = reach
        self.flags = flags
        self.shard = shard
        self.step = 0
        self.memory: Memory | None = None
        self.begun: tuple[int, Memory | None] = (0, None)
        self.between_updates = True
        self.gathered: dict[int, Memory] = {}

    @contextmanager
    def around(self, sample: dict[str, Any], model: nn.Module, rebuild_with: nn.Module) -> Iterator[dict[str, Any]]:
        """Context manager in which calling ``model`` on the sample continues its streams; yields the call's ``extra``.

        ``model`` may be wrapped for data parallelism; ``rebuild_with`` is the model itself.
        """
        stream = sample["stream"]
        memory = self._before(stream["step"], rebuild_with)
        if self.between_updates:
            self.begun, self.between_updates = (stream["step"], memory), False
        sample["net_input"]["memory"] = memory
        try:
            with extra_of(model) as extra:
                yield extra
        finally:
            # The sample may be kept, and is not to keep a memory alive.
            sample["net_input"].pop("memory", None)
        if "memory" in extra:
            self.memory, self.step = extra["memory"].finite(), stream["step"] + 1

    def along(self, samples: Iterable[dict[str, Any]], model: nn.Module) -> Iterator[dict[str, Any]]:
        """The samples for a caller that calls the model itself, as ``fairseq-eval-lm`` does."""
        for sample in samples:
            with self.around(sample, model, model):
                yield sample

    def _before(self, step: int, model: nn.Module) -> Memory | None:
        """The memory that the batch of this step continues, None at the beginning of the corpus."""
        if step == 0:
            return None
        if step == self.step and self.memory is not None:
            return self.memory
        if step == self.begun[0] and self.begun[1] is not None:
            # fairseq shows all batches of an update again after a gradient that was not finite.
            return self.begun[1]
        return self._rebuilt(step, model)

    def _rebuilt(self, step: int, model: nn.Module) -> Memory:
        """The memory at a step that nobody saved, from the tokens before it and the weights of now."""
        training = model.training
        model.eval()
        device = next(model.parameters()).device
        memory = None
        with torch.no_grad():
            for earlier in range(max(0, step - self.reach), step):
                sample = self.batches[earlier * self.batches.shards + self.shard]
                memory = model(sample["net_input"]["src_tokens"].to(device), memory=memory)[1]["memory"]
        model.train(training)
        if memory is None:
            rows = self.batches.streams
            memory = model.decoder.core.new_memory(rows)  # type: ignore[union-attr, operator]
        return memory

    @property
    def finished(self) -> bool:
        """Whether the epoch is over, and with it the memory."""
        return self.step >= self.batches.steps

    def gather(self) -> None:
        """Send the memories of all shards to the first one, whose process writes checkpoints; all have to call it.

        One after the other, so that no device has to hold more than one of them beside its own.
        """
        self.gathered = {}
        if self.memory is None or self.finished or self.batches.shards == 1 or not distributed.is_initialized():
            return
        mine = self.memory if distributed.get_backend() != "gloo" else self.memory.cpu()
        for shard in range(1, self.batches.shards):
            if self.shard == shard:
                for state in mine.states.values():
                    distributed.send(state.contiguous(), dst=0)
            elif self.shard == 0:
                states = {name: torch.empty_like(state).contiguous() for name, state in mine.states.items()}
                for state in states.values():
                    distributed.recv(state, src=shard)
                self.gathered[shard] = Memory(states, mine.pending_BT).cpu()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: tensors, numbers and names only."""
        return {
            "step": self.step,
            "finished": self.finished,
            "shard": self.shard,
            "layout": self._layout(),
            "memory": self.memory.state_dict() if self.memory is not None else None,
            "others": {shard: memory.state_dict() for shard, memory in self.gathered.items()},
        }

    def _layout(self) -> dict[str, Any]:
        """Settings that must not change within an epoch, by flag or by their name in checkpoints."""
        return {**self.batches.layout(), **self.flags}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue where the checkpoint was written; raises UsageError if the streams are cut differently now.

        All shards rebuild their memories if the same streams are spread over another number of ranks.
        """
        if saved["finished"]:
            # The next epoch begins without a memory, and may be cut as it likes.
            return
        layout = self._layout()
        for name, then in saved["layout"].items():
            if layout.get(name, then) != then:
                raise cannot_continue(_FLAGS.get(name, name), then, layout[name])
        others = saved.get("others", {})
        mine = saved["memory"] if saved["shard"] == self.shard else others.get(self.shard)
        if mine is None:
            return
        memory = Memory.from_state_dict(older_names.memory_of_today(mine))
        # Over another number of ranks, a shard has another number of the same streams.
        if memory.batch_size == self.batches.streams:
            self.step, self.memory = saved["step"], memory


@contextmanager
def extra_of(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Context manager: yields a dictionary that collects the ``extra`` of every call of ``model``."""
    extra: dict[str, Any] = {}

    def record(module: nn.Module, arguments: Any, output: Any) -> None:
        extra.update(output[1])

    handle = model.register_forward_hook(record)
    try:
        yield extra
    finally:
        handle.remove()
