"""What a training step of ``haed`` costs: packed against padded decoder, and the first phase against end to end.

    python benchmarks/haed.py [--rows 4] [--words 256] [--repeats 5] [--threads 2]
                              [--clock wall|cpu] [--json FILE]

The text is the documentation that comes with Python. A step is forward and backward of the paper's larger model
(``haed_wt103_iem``: 12 heads, 2,000 decoder units); times are medians of interleaved runs, saved bytes are those of
the tensors that autograd keeps for backward, parameters not counted. On a machine that does other things as well, ``--threads 1 --clock cpu`` counts
only what the steps themselves compute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from torch import Tensor
from torch.nn import functional as F

import fairseq_ms  # noqa: F401  (registers the models)
from fairseq_ms.data.chunk_sampling import predicted_chunks
from fairseq_ms.models.haed import HAED, IEM_CRITERION
from fairseq_ms.models.haed_config import SPACE
from fairseq_ms.models.presets import PRESETS

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def text_rows(rows: int, words: int, offset: int = 0) -> tuple[list[list[str]], Dictionary]:
    """Rows of symbols, each with that many words, and a dictionary of all symbols."""
    from pydoc_data.topics import topics

    everything = " ".join(" ".join(topics.values()).split()).split(" ")
    dictionary = Dictionary()
    for symbol in sorted({*"".join(everything), SPACE}):
        dictionary.add_symbol(symbol)
    picked = [everything[offset + row * words : offset + (row + 1) * words] for row in range(rows)]
    return [list(SPACE.join(row) + SPACE) for row in picked], dictionary


def padded_batch(rows: list[list[str]], dictionary: Dictionary) -> Tensor:
    """(B, T + 1) tokens that begin with the end of a line."""
    ids = [torch.tensor([dictionary.eos(), *(dictionary.index(symbol) for symbol in row)]) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=dictionary.pad())


def build(arch: str, dictionary: Dictionary, positions: int, **changes: Any) -> Any:
    """A model of a preset with random weights, in training mode."""
    model, preset = PRESETS[arch]
    cfg = MODEL_DATACLASS_REGISTRY[model]()
    flags = {"tokens_per_sample": positions, "max_target_positions": None, "criterion": "cross_entropy"}
    for name, value in {**flags, **preset, **changes}.items():
        setattr(cfg, name, value)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, args=None)
    return MODEL_REGISTRY[model].build_model(cfg, task).train()


def packed_step(model: HAED, tokens: Tensor, pad: int) -> Tensor:
    """The loss as it is trained: chunks packed by length."""
    logits, _ = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=pad)


def padded_step(model: HAED, tokens: Tensor, pad: int) -> Tensor:
    """The same loss by torch's own LSTM over chunks padded to the greatest length, the context beside every token."""
    decoder, source = model.decoder, tokens[:, :-1]
    chunks = decoder.hierarchy.table(source)
    main_MD = decoder.hierarchy(chunks)
    longest = decoder.hierarchy.segmentation.max_length
    read_ML = source.new_full((main_MD.shape[0], longest), pad)
    target_ML = read_ML.clone()
    read_ML[chunks.decoded_P, chunks.place_P] = source.flatten()[chunks.position_P]
    target_ML[chunks.decoded_P, chunks.place_P] = tokens[:, 1:].flatten()[chunks.position_P]
    context_MLD = main_MD.unsqueeze(1).expand(-1, longest, -1)
    hidden_MLU, _ = decoder.speller.lstm.cell(torch.cat([decoder.speller.embed(read_ML), context_MLD], dim=2))
    return F.cross_entropy(decoder.project(hidden_MLU).flatten(0, 1), target_ML.flatten(), ignore_index=pad)


def first_phase_step(model: Any, tokens: Tensor, further: Tensor) -> Tensor:
    """The loss of the first phase, with the chunks of further batches for candidates."""
    found = model(tokens, lambda own: predicted_chunks(model.hierarchy, further))
    return found.loss / found.rank_N.numel()


def saved_bytes(model: torch.nn.Module, step: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps between forward and backward, each storage once, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = step()
    del loss
    return sum(kept.values())


def measure(rows: int, words: int, repeats: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Seconds, saved bytes and their ratios."""
    torch.manual_seed(0)
    lines, dictionary = text_rows(rows, words)
    tokens = padded_batch(lines, dictionary)
    further = padded_batch(text_rows(3 * rows, words, offset=rows * words)[0], dictionary)
    model = build("haed_wt103_iem", dictionary, tokens.shape[1])
    first = build("haed_wt103_iem", dictionary, tokens.shape[1], criterion=IEM_CRITERION)
    steps: dict[str, tuple[Any, Callable[[], Tensor]]] = {
        "packed": (model, lambda: packed_step(model, tokens, dictionary.pad())),
        "padded": (model, lambda: padded_step(model, tokens, dictionary.pad())),
        "first_phase": (first, lambda: first_phase_step(first, tokens, further)),
    }
    losses = {name: float(step().detach()) for name, (_, step) in steps.items()}
    assert abs(losses["packed"] - losses["padded"]) < 1e-4, losses
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, (owner, step) in steps.items():
            owner.zero_grad(set_to_none=True)
            start = clock()
            step().backward()
            seconds[name].append(clock() - start)
    found: dict[str, float] = {"characters": float((tokens[:, 1:] != dictionary.pad()).sum())}
    for name, (owner, step) in steps.items():
        found[f"{name}_seconds"] = statistics.median(seconds[name])
        found[f"{name}_saved_bytes"] = float(saved_bytes(owner, step))
    found["packed_over_padded_time"] = found["packed_seconds"] / found["padded_seconds"]
    found["packed_over_padded_saved_bytes"] = found["packed_saved_bytes"] / found["padded_saved_bytes"]
    found["end_to_end_over_first_phase_time"] = found["packed_seconds"] / found["first_phase_seconds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--words", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = measure(arguments.rows, arguments.words, arguments.repeats, CLOCKS[arguments.clock])
    for name, value in found.items():
        print(f"{name:36s} {value:,.3f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
