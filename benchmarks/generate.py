"""How long sampling takes through fairseq's own generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from fairseq.models import FairseqLanguageModel
from torch import Tensor, nn

from benchmarks.peers import (
    PAPER,
    TINY,
    Shape,
    build,
    copy_weights,
    fairseq_lm,
    huggingface_gpt2,
    language_modeling,
    multiscale,
)
from benchmarks.runner import Contestant, Options, ParityError, Section, assert_parity
from benchmarks.training import FAIRSEQ, GPT2, VANILLA, label

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

NAME = "generate"
HELP = "time of sampling 256 tokens after a prefix of 64, at batch 1 and 8, against fairseq, GPT-2 and vanilla"

PREFIX, NEW_TOKENS, TOP_K, TEMPERATURE = 64, 256, 10, 0.7
CONTESTANTS = (VANILLA, "topdown 7,7,8,8", "topdown 2,4,8,12", "bottomup 8,9,9", "retina 12")
HALF = " bfloat16"
# bfloat16 has eight bits, and logits of random weights are of order 1: a few units in the last place after two layers.
HALF_TOLERANCE = 0.03
# By batch size, relative to fairseq's model.
GOALS = {
    1: {
        "topdown 2,4,8,12": 0.42,
        "topdown 7,7,8,8": 0.34,
        "bottomup 8,9,9": 0.39,
        "retina 12": 0.38,
        **{name + HALF: 0.27 for name in CONTESTANTS[1:]},
    },
    8: {"topdown 2,4,8,12": 0.30, "topdown 7,7,8,8": 0.22, "bottomup 8,9,9": 0.28, "retina 12": 0.23},
}
GPT2_GOALS = {1: {"topdown 2,4,8,12": 0.63}, 8: {"topdown 2,4,8,12": 0.34}}
VANILLA_GOALS = {1: {"topdown 7,7,8,8": 0.82}, 8: {"topdown 7,7,8,8": 0.68}}


class Sampler:
    """Samples from a fairseq model the way ``fairseq-interactive`` does: ``task.inference_step``."""

    def __init__(self, model: FairseqLanguageModel, shape: Shape, new_tokens: int, sampling: bool = True) -> None:
        self.model = model.eval()
        self.task = language_modeling(shape)
        model.prepare_for_inference_(SimpleNamespace(generation=SimpleNamespace(beam=1, print_alignment=None)))
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


class HuggingFaceSampler:
    """The same from Hugging Face's ``generate``, which caches keys and values by itself."""

    def __init__(self, model: GPT2LMHeadModel, new_tokens: int) -> None:
        self.model = model.eval()
        self.new_tokens = new_tokens

    def __call__(self, prefix: Tensor) -> None:
        start = prefix.new_full((prefix.size(0), 1), 2)
        tokens = torch.cat([start, prefix], dim=1)
        output = self.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=TOP_K, temperature=TEMPERATURE,
            max_new_tokens=self.new_tokens, min_new_tokens=self.new_tokens, pad_token_id=1,
        )  # fmt: skip
        assert output.size(1) == tokens.size(1) + self.new_tokens, output.shape


class _Uncached(nn.Module):
    """A naive twin: the whole sequence again for every token, without caches or packed weights."""

    def __init__(self, model: FairseqLanguageModel) -> None:
        super().__init__()
        self.model = model.eval()

    def greedy(self, tokens: Tensor, count: int, forbidden: list[int]) -> list[list[int]]:
        with torch.no_grad():
            for _ in range(count):
                logits = self.model(tokens)[0][:, -1]
                logits[:, forbidden] = -torch.inf
                tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        return tokens[:, 1:].tolist()


@cache
def _parity(names: tuple[str, ...], half: bool) -> str:
    """Greedy continuations by the measured path, against the naive twin, at a small shape."""
    shape = replace(TINY, length=PREFIX + 16)
    prefix = random_prefix(shape, 3)
    for name in names:
        continued = Sampler(sampled_model(name, shape), shape, 12, sampling=False)(prefix)
        twin = _Uncached(sampled_model(name, shape))
        words = language_modeling(shape).source_dictionary
        start = torch.cat([prefix.new_full((3, 1), words.eos()), prefix], dim=1)
        forbidden = [words.pad(), words.eos()]
        expected = twin.greedy(start, 12, forbidden)
        if [row[:-1] for row in continued] != expected:
            raise ParityError(f"{name}: the cached path continues otherwise than the model run over whole sequences")
    worst = max(_half_parity(name, shape) for name in names if name != FAIRSEQ) if half else None
    equal = f"greedy continuations of {len(names)} models equal those without caches, token for token"
    return equal if worst is None else f"{equal}; in bfloat16 cached logits are float32's, uncached, to {worst:.2g}"


def _half_parity(name: str, shape: Shape) -> float:
    """Logits in bfloat16 through caches and packed weights, position by position, against float32 without either."""
    prefix = random_prefix(shape, 3)
    tokens = torch.cat([prefix.new_full((3, 1), 2), prefix], dim=1)
    half = sampled_model(name, shape).bfloat16().eval()
    half.prepare_for_inference_(SimpleNamespace(generation=SimpleNamespace(beam=1, print_alignment=None)))
    state: dict[str, object] = {}
    with torch.inference_mode():
        steps = range(PREFIX // 2, PREFIX + 2)
        cached = torch.cat([half.decoder(tokens[:, :end], incremental_state=state)[0] for end in steps], dim=1)
        whole = sampled_model(name, shape).eval()(tokens)[0][:, PREFIX // 2 - 1 :]
    return assert_parity(f"{name} in bfloat16", cached.float(), whole, HALF_TOLERANCE)


def sampled_model(name: str, shape: Shape) -> FairseqLanguageModel:
    """fairseq's model or one of ours, all with the same weights where they have the same layers."""
    if name == FAIRSEQ:
        model = fairseq_lm(shape)
        copy_weights(sampled_model(VANILLA, shape), model)
        return model
    if name == VANILLA:
        return build("vanilla_lm", shape, decoder_layers=shape.layers)
    return multiscale(name, shape)


def random_prefix(shape: Shape, rows: int) -> Tensor:
    """Random tokens (B, P)."""
    return torch.randint(4, shape.vocabulary, (rows, PREFIX), generator=torch.Generator().manual_seed(0))


def sections(options: Options) -> Iterable[Section]:
    """At batch 1, with bfloat16 as well, and batch 8: against fairseq's model, GPT-2 and our own vanilla."""
    shape = TINY if options.quick else PAPER
    new_tokens = 8 if options.quick else NEW_TOKENS
    names = [name for name in CONTESTANTS if not options.only or any(part in name for part in options.only)]
    samplers: dict[str, Callable[[Tensor], object]] = {
        FAIRSEQ: Sampler(sampled_model(FAIRSEQ, shape), shape, new_tokens)
    }
    for name in names:
        samplers[name] = Sampler(sampled_model(name, shape), shape, new_tokens)
    gpt2 = huggingface_gpt2(shape)
    if gpt2 is not None:
        samplers[GPT2] = HuggingFaceSampler(gpt2, new_tokens)
    for rows in (1, 8):
        prefix = random_prefix(shape, rows)
        what = f"prefix {PREFIX} + {new_tokens} tokens, top-{TOP_K}, temperature {TEMPERATURE}, batch {rows}; {shape}"
        parity = partial(_parity, (FAIRSEQ, *names), rows == 1)
        goals = {} if options.quick else GOALS[rows]
        entrants = dict(samplers)
        if rows == 1:
            entrants |= {
                name + HALF: Sampler(sampled_model(name, shape).bfloat16(), shape, new_tokens) for name in names
            }
        further = {} if options.quick else {GPT2: GPT2_GOALS[rows], VANILLA: VANILLA_GOALS[rows]}
        yield _section(what, entrants, prefix, goals, further, shape, new_tokens, parity)


def _section(
    what: str,
    samplers: dict[str, Callable[[Tensor], object]],
    prefix: Tensor,
    goals: dict[str, float],
    further: dict[str, dict[str, float]],
    shape: Shape,
    new_tokens: int,
    parity: Callable[[], str],
) -> Section:
    def runs(sampler: Callable[[Tensor], object]) -> Callable[[], None]:
        def run() -> None:
            torch.manual_seed(3)
            sampler(prefix)

        return run

    contestants = [Contestant(label(name, shape), runs(s), goals.get(name)) for name, s in samplers.items()]
    others = {
        label(baseline, shape): {label(name, shape): goal for name, goal in own.items()}
        for baseline, own in further.items()
    }
    scale = 1e3 / new_tokens
    return Section(what, "ms a token", contestants, label(FAIRSEQ, shape), parity, scale=scale, further=others)
