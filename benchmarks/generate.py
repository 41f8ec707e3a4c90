"""How long sampling takes: through fairseq's own generator, the core's and Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models import FairseqLanguageModel
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.device import peak
from benchmarks.peers import (
    FAIRSEQ,
    GPT2,
    MULTISCALE,
    PAPER,
    TINY,
    VANILLA,
    Shape,
    build_model,
    copy_weights,
    label,
    language_modeling,
)
from benchmarks.table import DTYPES, GB, TIME, Cell, Options, ParityError, Row, Table, Work, assert_parity, to

PREFIX, NEW_TOKENS, TOP_K, TEMPERATURE = 64, 256, 10, 0.7
CONTESTANTS = (VANILLA, *MULTISCALE)[:-1]
# bfloat16 has eight bits, and logits of random weights are of order 1: a few units in the last place after two layers.
HALF_TOLERANCE = 0.03
# What draws the tokens.
GENERATOR, CORE, THEIRS = "fairseq's generator", "core", "transformers"
# On a GPU, ours can replay CUDA graphs.
WITH_GRAPHS = "core, graphs=True"
# On a CPU, what bounds a step: every matrix has to be read once.
MATRICES = "its matrices alone"


class Sampler:
    """Samples from a fairseq model the way ``fairseq-interactive`` does: ``task.inference_step``."""

    def __init__(self, model: FairseqLanguageModel, shape: Shape, new_tokens: int, sampling: bool = True) -> None:
        self.model = prepared(model)
        self.task = language_modeling(shape)
        self.new_tokens = new_tokens
        settings = SimpleNamespace(
            beam=1, sampling=sampling, sampling_topk=TOP_K if sampling else -1, temperature=TEMPERATURE, max_len_a=0,
            max_len_b=PREFIX + new_tokens, min_len=PREFIX + new_tokens,
        )  # fmt: skip
        self.generator = self.task.build_generator([model], settings)

    def __call__(self, prefix: Tensor) -> list[list[int]]:
        """Prefixes (B, P) -> the tokens of each with what was sampled."""
        start = prefix.new_full((prefix.size(0), 1), self.task.source_dictionary.eos())
        sample = {"net_input": {"src_tokens": torch.cat([start, prefix], dim=1)}, "id": torch.arange(prefix.size(0))}
        rows = self.task.inference_step(self.generator, [self.model], sample)
        tokens = [row[0]["tokens"].tolist() for row in rows]
        assert all(len(row) == prefix.size(1) + self.new_tokens + 1 for row in tokens), [len(row) for row in tokens]
        return tokens


def prepared(model: FairseqLanguageModel) -> FairseqLanguageModel:
    """The model as fairseq's commands make it ready to generate."""
    model.eval().prepare_for_inference_(SimpleNamespace(generation=SimpleNamespace(beam=1, print_alignment=None)))
    return model


def sampled_model(name: str, shape: Shape) -> FairseqLanguageModel:
    """fairseq's model or one of ours, all with the same weights where they have the same layers."""
    model = build_model(name, shape)
    if name == FAIRSEQ:
        copy_weights(build_model(VANILLA, shape), model)
    return model


def random_prefix(shape: Shape, rows: int) -> Tensor:
    """Random tokens (B, P)."""
    return torch.randint(4, shape.vocabulary, (rows, PREFIX), generator=torch.Generator().manual_seed(0))


def work(name: str, through: str, shape: Shape, rows: int, precision: str, new_tokens: int, options: Options) -> Work:
    """Sampling after prefixes of so many rows; time and memory of a batch of sequences."""
    model: Any = build_model(name, shape) if name == GPT2 else sampled_model(name, shape)
    model = model.to(options.device, DTYPES[precision]).eval()
    prefix = random_prefix(shape, rows).to(options.device)
    start = torch.cat([prefix.new_full((rows, 1), 2), prefix], dim=1)
    sampler: Callable[[], object]
    if through == GENERATOR:
        sampler = partial(Sampler(model, shape, new_tokens), prefix)
    elif through == MATRICES:
        sampler = partial(read_matrices, model, rows, new_tokens)
    elif through in (CORE, WITH_GRAPHS):
        core, graphs = prepared(model).decoder.core, through == WITH_GRAPHS
        sampler = partial(core.generate, start, new_tokens, TEMPERATURE, TOP_K, graphs=graphs)
    else:
        sampler = partial(
            model.generate, start, attention_mask=torch.ones_like(start), do_sample=True, top_k=TOP_K,
            temperature=TEMPERATURE, max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=1,
        )  # fmt: skip

    def run() -> None:
        torch.manual_seed(3)
        with torch.no_grad():
            sampler()

    def others() -> Mapping[str, Cell]:
        return {"peak": peak(run, options) / GB}

    return Work(run, new_tokens, others)


def read_matrices(model: FairseqLanguageModel, rows: int, count: int) -> None:
    """Multiply so many rows with every matrix that a step of the model reads, again and again."""
    weights = [part.weight for part in model.modules() if isinstance(part, nn.Linear)]
    inputs = [torch.ones(rows, weight.size(1), dtype=weight.dtype) for weight in weights]
    for _ in range(count):
        for x_BI, weight_OI in zip(inputs, weights, strict=True):
            F.linear(x_BI, weight_OI)


def tables(options: Options) -> list[Table]:
    """Every model at every batch size, in what a device is best at; fp16 as well, or bfloat16 on a CPU."""
    shape = TINY if options.quick else replace(PAPER, vocabulary=31_300) if options.on_gpu else PAPER
    new_tokens = 8 if options.quick else NEW_TOKENS
    batches = (2,) if options.quick else (1, 8, 64) if options.on_gpu else (1, 8)
    ours = (GENERATOR, CORE, WITH_GRAPHS) if options.on_gpu else (GENERATOR, CORE)
    ways = dict.fromkeys(CONTESTANTS, ours) | {FAIRSEQ: (GENERATOR,), GPT2: (THEIRS,)}
    if not options.on_gpu:
        ways[VANILLA] = (*ours, MATRICES)
    wanted = [(precision, batch) for precision in options.precisions for batch in batches]
    if not options.on_gpu:
        # fairseq's model stays in float32, where a CPU is at its best.
        wanted.append(("bf16", batches[0]))
    rows = [
        Row(
            (label(name, shape), through, str(batch), precision),
            partial(work, name, through, shape, batch, precision, new_tokens, options),
            f"{batch}" if not options.on_gpu else f"{batch}, {precision}",
        )
        for precision, batch in wanted
        for name, all_ways in ways.items()
        for through in all_ways
        if precision in options.precisions or name in CONTESTANTS
    ]

    def base(settings: tuple[str, ...], name: str, through: str) -> tuple[str, ...]:
        precision = settings[3] if options.on_gpu or name == VANILLA else options.precisions[0]
        return to(settings, model=label(name, shape), at1=through, at3=precision)

    about = (
        f"A prefix of {PREFIX} tokens and {new_tokens} sampled ones (top {TOP_K}, temperature {TEMPERATURE:g}), the "
        f"time of a sampled token of every row; {shape}."
    )
    ratios = {
        "to fairseq's": partial(base, name=FAIRSEQ, through=GENERATOR),
        "to vanilla's": partial(base, name=VANILLA, through=GENERATOR),
        "to GPT-2's": partial(base, name=GPT2, through=THEIRS),
    }
    settings = ["model", "through", "batch", "precision"]
    columns = {TIME: "ms a step", "peak": "peak, GB"}
    return [Table("generate", "Generation", about, settings, columns, rows, 1e3, ratios, parity)]


def parity() -> str:
    """Greedy continuations by the measured paths, against models run over whole sequences, at a small shape."""
    shape, new = replace(TINY, length=PREFIX + 16), 12
    prefix = random_prefix(shape, 3)
    words = language_modeling(shape).source_dictionary
    start = torch.cat([prefix.new_full((3, 1), words.eos()), prefix], dim=1)
    for name in (FAIRSEQ, *CONTESTANTS):
        expected = _uncached(sampled_model(name, shape).eval(), start, new, words.pad(), words.eos())
        found = [row[:-1] for row in Sampler(sampled_model(name, shape), shape, new, sampling=False)(prefix)]
        if found != [row[1:] for row in expected]:
            raise ParityError(f"{name}: the cached path continues otherwise than the model run over whole sequences")
        if name != FAIRSEQ:
            core = prepared(sampled_model(name, shape)).decoder.core
            if core.generate(start, new, temperature=0).tolist() != _uncached(core, start, new):
                raise ParityError(f"{name}: the core continues otherwise than the model run over whole sequences")
    worst = max(_half_parity(name, shape) for name in CONTESTANTS)
    return (
        f"greedy continuations of {1 + len(CONTESTANTS)} models equal those without caches, token for token; in "
        f"bfloat16 cached logits are float32's, uncached, to {worst:.2g}"
    )


@torch.no_grad()
def _uncached(model: Callable[[Tensor], Any], tokens: Tensor, count: int, *forbidden: int) -> list[list[int]]:
    """A naive twin: the whole sequence again for every token, without caches or packed weights."""
    for _ in range(count):
        logits = model(tokens)[0][:, -1]
        logits[:, list(forbidden)] = -torch.inf
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    whole: list[list[int]] = tokens.tolist()
    return whole


@torch.inference_mode()
def _half_parity(name: str, shape: Shape) -> float:
    """Logits in bfloat16 through caches and packed weights, position by position, against float32 without either."""
    prefix = random_prefix(shape, 3)
    tokens = torch.cat([prefix.new_full((3, 1), 2), prefix], dim=1)
    half = prepared(sampled_model(name, shape).bfloat16())
    state: dict[str, object] = {}
    steps = range(PREFIX // 2, PREFIX + 2)
    cached = torch.cat([half.decoder(tokens[:, :end], incremental_state=state)[0] for end in steps], dim=1)
    whole = sampled_model(name, shape).eval()(tokens)[0][:, PREFIX // 2 - 1 :]
    return assert_parity(f"{name} in bfloat16", cached.float(), whole, HALF_TOLERANCE)
