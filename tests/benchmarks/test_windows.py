"""The driver of the windows' table: prototypes against the core, losses told apart by hand, runs that are stopped."""

import itertools
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import windows
from benchmarks.prototypes import DenseAttention, keys_a_head, parse
from benchmarks.windows import ARMS, PARTS, SIZES, Arm, Corpus, build, distances_back, evaluate, main, page
from fairseq_ms.core import Retina, RetinaConfig, Vanilla, VanillaConfig
from tests.preprocess import sample

QUICK = SIZES["quick"]
SIZE: dict[str, Any] = {
    "vocab_size": 40,
    "dim": 16,
    "ffn_dim": 32,
    "heads": 4,
    "layers": 2,
    "positions": "rotary",
    **PARTS,
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    source = sample.write_sample(folder / "text.txt", lines=900)
    sample.prepare("text", "--input", source, "--documents", "lines:20", "--bpe-merges", "60", "--out", folder / "text")
    return folder / "text"


@pytest.mark.parametrize("text", ["1x=0:", "1x=0:5", "1x=0:4*1,4x=4:16*3", "1x=0:3*1,1x=0:*2,4x=4:*1"])
def test_a_prototype_is_the_core_s_attention_where_the_core_has_such_windows(text: str) -> None:
    model: Any = Vanilla(VanillaConfig.from_dict(SIZE))
    (groups,) = parse(text, 4)
    core: Any = Retina(RetinaConfig(scales=tuple(replace(g.windows[0], heads=g.heads) for g in groups), **SIZE))
    for own, other in zip(model.stack.layers, core.layers, strict=True):
        own.attention = DenseAttention(model.config, groups)
        nn.init.normal_(own.attention.short_conv.weight)
        weights_of(own.attention, other.attention)
        other.ffn = own.ffn
    core.embed, core.project, core.norm = model.embed, model.project, model.stack.norm
    tokens = torch.randint(40, (2, 37), generator=torch.Generator().manual_seed(1))
    ours, theirs = (m.eval().logits(m.features(tokens)) for m in (model, core))
    # Sums in another order.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    shared = [model.stack.layers[0].ffn.up.weight, model.embed.words.weight]
    grads = [torch.autograd.grad(out.square().mean(), shared) for out in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def weights_of(layer: Any, core: Any) -> None:
    """Give a core's attention, whose heads of one scale share a projection, the weights of a prototype."""
    for name in ("weight", "bias"):
        of_scales: dict[int, list[torch.Tensor]] = {}
        for own in layer.groups:
            pair = getattr(own.pairs[0], name).detach()
            of_scales.setdefault(own.group.windows[0].factor, []).append(pair)
        # Keys of all heads of a scale lie in front of their values.
        joined = [
            torch.cat([h for half in zip(*(p.chunk(2) for p in pairs)) for h in half]) for pairs in of_scales.values()
        ]
        getattr(core.fine, name).data = torch.cat([getattr(layer.query, name).detach(), joined[0]])
        for other, pair in zip(core.coarse, joined[1:], strict=True):
            getattr(other, name).data = pair
    core.norm, core.short_conv, core.qk, core.out = layer.norm, layer.short_conv, layer.qk, layer.out


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_is_causal_uses_all_its_parts_and_has_the_cache_that_it_says(arm: Arm) -> None:
    model = build(arm, QUICK, 50, seed=1).eval()
    for parameter in model.parameters():
        # Also what begins at zero.
        nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(50, (1, 256), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 160] = (changed[0, 160] + 1) % 50
    before, after = (model.logits(model.features(text)) for text in (tokens, changed))
    assert torch.equal(before[:, :160], after[:, :160])
    assert not torch.equal(before[:, 160:], after[:, 160:])
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    number = re.search(r"\d+$", arm.name)
    full = {"small": 770, "four": 516}.get(arm.name.partition(" ")[0], 1024)
    keys = full if "full" in arm.name else int(number[0]) if number else 128
    assert keys_a_head(parse(arm.windows, 8), 1024) == pytest.approx(keys, rel=0.015)
    # Small heads stay small in longer texts.
    assert keys_a_head(parse(arm.windows, 8, 4), 4096) == pytest.approx(4 * keys, rel=0.04)


@pytest.mark.parametrize(("gate", "turned"), [(False, True), (True, True), (True, False)])
def test_tokens_and_pooled_blocks_share_one_softmax_with_a_level(gate: bool, turned: bool) -> None:
    config = VanillaConfig.from_dict({**SIZE, "heads": 1})
    ((group,),) = parse("1x=0:4+2x=4:", 1)
    model: Any = DenseAttention(config, [group], gate, turned)
    own = model.groups[0]
    for parameter in own.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, q = torch.randn(1, 9, 16), torch.randn(1, 1, 9, 16)
    pooled = []
    for pair in x[0, :8].split(2):
        weights = (own.gates["1"](pair) + own.places["1"]).softmax(0) if gate else torch.full((2, 32), 0.5)
        pooled.append((own.pairs[1](pair) * weights).sum(0))
    pairs = [own.pairs[0](x), torch.stack(pooled)[None]]
    rotations = [config.rotation_after(0, 9, x), config.rotation_after(0, 9, x, 2) if turned else None]
    keys = [model.qk(pair, 0, 1, rotation)[0] for pair, rotation in zip(pairs, rotations, strict=True)]
    k, v = torch.cat(keys).chunk(2, dim=-1)
    expected = []
    for t in range(9):
        seen = [s for s in range(9) if 0 <= t - s < 4] + [9 + c for c in range(4) if t - 2 * c >= 4]
        level = torch.stack([own.levels[0, int(s >= 9)] for s in seen])
        expected.append((q[0, 0, t] @ k[seen].T / 4.0 + level).softmax(-1) @ v[seen])
    torch.testing.assert_close(own(q, x, model.qk)[0, 0], torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["1x=0", "1x=0:8*2,,1x=0:*6", "1x=0:8*9", "4x=0:8", "1x=8:8", "1x=0:8+"])
def test_windows_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse(text, 8)


def test_losses_are_told_apart_by_how_far_back_the_same_pair_stood(prepared: Path) -> None:
    row = [1, 2, 1, 2, 3, 1, 2]
    naive = []
    for t, pair in enumerate(itertools.pairwise(row)):
        same = [s for s in range(t) if (row[s], row[s + 1]) == pair]
        naive.append(t - same[-1] if same else 0)
    assert distances_back(row) == naive == [0, 0, 2, 0, 0, 3]
    corpus = Corpus(prepared)
    found = evaluate(build(ARMS[0], QUICK, corpus.symbols, 1), corpus, QUICK, torch.device("cpu"))
    assert sum(found["share"].values()) == pytest.approx(1.0, abs=1e-3)
    mean = sum(found["share"][name] * loss for name, loss in found["distance"].items())
    assert mean == pytest.approx(found["all"], rel=1e-3)


def test_a_run_that_is_stopped_goes_on_as_if_nothing_had_happened(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(name: str) -> dict[str, dict]:
        found = (tmp_path / name / "records.jsonl").read_text().splitlines()[1:]
        return {line["key"]: {**line["numbers"], "step": 0} for line in map(json.loads, found)}

    command = [str(prepared), "--size", "quick", "--only", "full", "window 128"]
    assert main([*command, "--out", str(tmp_path / "whole"), "--seeds", "1"]) == 0
    # A clock on which every look takes a second, so that the time is over after a few updates.
    clock = {"monotonic": partial(next, itertools.count()), "process_time": float}
    monkeypatch.setattr(windows, "time", SimpleNamespace(**clock))
    codes: list[int] = []
    while not codes or (codes[-1] == 3 and len(codes) < 60):
        codes.append(main([*command, "--out", str(tmp_path / "sliced"), "--seeds", "1", "--minutes", "0.15"]))
    assert codes[-1] == 0
    assert len(codes) > 4
    assert lines("sliced") == lines("whole")
    assert len(lines("whole")) == 2 * 4
    assert not list(tmp_path.glob("*/*.pt"))


def test_the_page_says_what_has_run_and_what_has_not(prepared: Path, tmp_path: Path) -> None:
    out, report, png = tmp_path / "out", tmp_path / "page.md", tmp_path / "page.png"
    command = [str(prepared), "--out", str(out), "--size", "quick", "--only", "full", "small heads"]
    assert main([*command, "--report", str(report)]) == 0
    text = report.read_text()
    lines = map(json.loads, (out / "records.jsonl").read_text().splitlines()[1:])
    losses = {line["key"]: line["numbers"]["all"] for line in lines}
    assert len(losses) == 2 * 4 + 2
    for arm in ("full", "small heads"):
        seeds = ", ".join(f"{losses[f'text | {arm} | seed {seed}']:.3f}" for seed in (1, 2))
        tenth = f"{min(loss for key, loss in losses.items() if f'{arm} | rate' in key):.3f}"
        assert re.search(rf"(?m)^\| {arm} \| .*\| {tenth} \| {seeds} \|", text)
    assert "window 128" in text.partition("Not run")[2]
    assert png.stat().st_size > 10_000


@pytest.mark.parametrize("name", ["windows", "windows_longer"])
def test_a_page_in_docs_is_that_of_its_records(name: str) -> None:
    papers = Path(__file__).parents[2] / "docs" / "papers"
    head, *lines = map(json.loads, (papers / name / "records.jsonl").read_text().splitlines())
    assert (papers / f"{name}.md").read_text() == page(
        {line["key"]: line for line in lines}, head["machine"], f"{name}.png"
    )


def test_a_folder_that_prepare_has_not_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--out", str(tmp_path / "out"), "--size", "quick"])
    assert "CORPUS must" in capsys.readouterr().err
