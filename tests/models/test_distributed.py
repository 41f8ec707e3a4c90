"""Torch's DistributedDataParallel, fairseq's default backend: every parameter has a gradient, whatever the batch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairseq_ms.core.ops.recompute import keep_in_graph
from tests.helpers.corpus import random_flags, train_command, write_corpus
from tests.helpers.forked import run
from tests.models.test_iem import batch, criterion, first_phase, small_task
from tests.registry import ARCHITECTURES, build, dictionary

SEEDS = range(3)
ADAPTIVE = {
    "adaptive_input": True,
    "adaptive_input_cutoff": "5,7",
    "adaptive_input_factor": 1.0,
    "share_decoder_input_output_embed": False,
}
SCALES = {"scale_layers": "1x=1,2x=1,4x=1", "tokens_per_sample": 8, "droppath": 0.9}
# What leaves the most without work, beside random configurations.
IDLE = {
    "transformer_ql": [
        {**SCALES, "mem_len": memory, "output_layers": layers} for memory, layers in ((0, 1), (6, 1), (0, 0))
    ],
    "multiscale_bottomup": [{"scale_layers": "1x=1,2x=1,4x=1", "decoder_attention_heads": 2, "scale_heads": None}],
}


def configurations() -> list[tuple[str, dict]]:
    """Every architecture with several configurations, the first with an adaptive input where there is one."""
    found = []
    for arch in ARCHITECTURES:
        drawn = [random_flags(arch, seed) for seed in SEEDS]
        if "share_decoder_input_output_embed" in drawn[0]:
            drawn.append({**drawn[0], **ADAPTIVE})
        drawn += [{**drawn[0], **flags} for flags in IDLE.get(arch, [])]
        found += [(arch, flags) for flags in drawn]
    return found


def short_loss(model: nn.Module, words: int, length: int) -> Tensor:
    """A training loss over two lines of so many tokens."""
    tokens = torch.randint(2, words, (2, length + 1))
    logits, extra = model(tokens[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return loss if extra.get("auxiliary_loss") is None else loss + extra["auxiliary_loss"].sum()


@pytest.mark.parametrize(("arch", "flags"), configurations())
def test_the_shortest_batches_give_every_parameter_a_gradient(arch: str, flags: dict) -> None:
    torch.manual_seed(1)
    words = dictionary(9)
    model = build(arch, flags, words).train()
    for length in range(1, 9):
        model.zero_grad()
        short_loss(model, len(words), length).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == [], f"at length {length}"
        assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("length", range(1, 9))
def test_the_shortest_batches_give_every_parameter_of_the_first_phase_a_gradient(length: int) -> None:
    model, task = first_phase(2), small_task()
    sample = batch(task, [1])
    sample["net_input"]["src_tokens"] = sample["net_input"]["src_tokens"][:, :length]
    sample["target"] = sample["target"][:, :length]
    criterion(task)(model, sample)[0].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


# All lines are shorter than a segment; most lines are longer, so that often only one process has a whole segment.
@pytest.mark.parametrize("flags", [("--batch-size", "4"), ("--batch-size", "1", "--tokens-per-sample", "9")])
def test_fairseqs_default_backend_trains_on_lines_shorter_than_a_segment(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    data = write_corpus(tmp_path)
    command = train_command("compressive_transformer", data, tmp_path / "save", "--sample-break-mode", "eos", *flags)
    assert run([*command, "--max-update", "12"], tmp_path / "log", ranks=2) == [0, 0], (tmp_path / "log").read_text()
    assert (tmp_path / "save" / "checkpoint_last.pt").is_file()


def test_what_is_kept_in_the_graph_gets_a_gradient_of_zero_where_sums_overflow() -> None:
    parameter = nn.Parameter(torch.full((3, 400), 60_000.0, dtype=torch.float16))
    assert parameter.sum().isinf(), "or this test tests nothing"
    x = torch.randn(5, 4, dtype=torch.float16, requires_grad=True)
    y = keep_in_graph(x, [parameter, nn.Parameter(torch.ones(2))])
    assert torch.equal(y, x)
    assert y.dtype == x.dtype
    y.backward(torch.full_like(y, 60_000.0))
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 60_000.0))
    assert keep_in_graph(x, []) is x
