"""torch's optimizers under fairseq's trainer: equal to a plain loop, in every precision, and what is refused."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import optim, tasks
from fairseq.logging import metrics
from torch.nn import functional as F

from fairseq_ms import core
from fairseq_ms.core.optimizers import MuonAndAdamW, rows_of_projections
from fairseq_ms.errors import UsageError, sentence_of
from fairseq_ms.host import rules
from fairseq_ms.host.trainer import Trainer
from fairseq_ms.optim import of_torch
from tests.helpers.resumed import RETINA, TINY
from tests.helpers.trained import configuration, random_lines, write_corpus

SYMBOLS, ROWS, LENGTH = 16, 4, 8
ADAMW: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-7}
MUON = ("--optimizer", "muon", "--lr", "0.02", "--adam-lr", "0.005")
OWN = ("--weight-decay", "0.1", "--adam-betas", "(0.9, 0.95)", "--adam-eps", "1e-7")
MODEL = core.Vanilla(core.VanillaConfig(vocab_size=9, dim=8, ffn_dim=8, heads=2, layers=1))
VANILLA = ("--arch", "vanilla_lm", *TINY, "--decoder-layers", "2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("muon") / "data", {"train": random_lines(1, 30, words=SYMBOLS - 4)})


@functools.cache
def parsed(*given: str) -> Any:
    """What ``fairseq-train`` makes of its arguments, which takes it longer than a tiny training."""
    flags = ["--tokens-per-sample", str(LENGTH), "--dropout", "0", "--attention-dropout", "0", "--init-std", "0.2"]
    flags += ["--cpu", "--batch-size", str(ROWS), "--max-update", "10", "--save-dir", "none"]
    return configuration("language_modeling", [*given, *flags])


def trainer_of(data: Path, *flags: str, **changes: Any) -> Trainer:
    """fairseq's, of a tiny model without dropout on a CPU; ``changes`` are of ``common``."""
    cfg = copy.deepcopy(parsed(str(data), *flags))
    cfg.common.update(changes)
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def batches(count: int) -> list[torch.Tensor]:
    """Tokens (ROWS, LENGTH + 1), each with the one after the last; as many targets as a power of two divides well."""
    generator = torch.Generator().manual_seed(2)
    return list(torch.randint(4, SYMBOLS, (count, ROWS, LENGTH + 1), generator=generator))


def trained(trainer: Trainer, tokens: list[torch.Tensor]) -> list[float]:
    """The losses of an update each, or of half of one with ``--update-freq 2``, in nats."""
    found = []
    for start in range(0, len(tokens), trainer.cfg.optimization.update_freq[0]):
        samples = [
            {
                "id": torch.arange(ROWS),
                "nsentences": ROWS,
                "ntokens": ROWS * LENGTH,
                "net_input": {"src_tokens": part[:, :-1], "src_lengths": torch.full((ROWS,), LENGTH)},
                "target": part[:, 1:].contiguous(),
            }
            for part in tokens[start : start + trainer.cfg.optimization.update_freq[0]]
        ]
        with metrics.aggregate(new_root=True) as meters:
            trainer.train_step(samples)
        found.append(float(meters["loss"].avg) * math.log(2))
    return found


@pytest.mark.parametrize("flags", [VANILLA, ("--arch", "retina_lm", *RETINA)], ids=["vanilla_lm", "retina_lm"])
def test_muon_trains_as_a_plain_loop_with_the_cores_optimizer(flags: tuple[str, ...], data: Path) -> None:
    """Which is torch's two over single projections (tests/core/test_optimizers.py)."""
    trainer = trainer_of(data, *flags, *MUON, *OWN, "--update-freq", "2", "--clip-norm", "1")
    model = copy.deepcopy(trainer.get_model().decoder.core).train()
    tokens = batches(12)
    found = trained(trainer, tokens)
    _, others = core.matrices_and_others(model)
    optimizer = MuonAndAdamW(rows_of_projections(model), others, 0.02, 0.005, {"weight_decay": 0.1}, ADAMW)
    expected = []
    for one, other in zip(tokens[::2], tokens[1::2]):
        losses = [
            F.cross_entropy(model(part[:, :-1])[0].flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            for part in (one, other)
        ]
        loss = torch.stack(losses).sum() / (2 * ROWS * LENGTH)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    # Single precision; a last bit may tip a rounding to eight bits within Muon, of an update of 0.02.
    assert found == pytest.approx(expected, rel=2e-4)
    for mine, theirs in zip(trainer.get_model().decoder.core.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("name", ["adamw", "apex"])
def test_adamw_trains_as_torchs_and_takes_apex_where_it_is_installed(
    name: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(data, *VANILLA, "--optimizer", "adamw", "--lr", "0.005", *OWN)
    model = copy.deepcopy(trainer.get_model().decoder.core).train()
    if name == "apex":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(of_torch, "get_fused_adam_class", lambda: torch.optim.NAdam)
        assert isinstance(
            optim.build_optimizer(trainer.cfg.optimizer, list(model.parameters())).optimizer, torch.optim.NAdam
        )
        return
    tokens, expected = batches(5), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, **ADAMW)
    for part in tokens:
        loss = F.cross_entropy(model(part[:, :-1])[0].flatten(0, 1), part[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert trained(trainer, tokens) == pytest.approx(expected, rel=1e-5)
    assert trainer.optimizer.optimizer.param_groups[0]["fused"]
    assert trainer.optimizer.supports_flat_params


def test_all_rates_follow_the_schedule_in_proportion(data: Path) -> None:
    schedule = ("--lr-scheduler", "cosine", "--warmup-updates", "3", "--max-update", "9")
    trainer = trainer_of(data, *VANILLA, *MUON, *schedule)
    trainer.optimizer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    rates = []
    for part in batches(9):
        trained(trainer, [part])
        matrices, *others = copy.deepcopy(trainer.optimizer.optimizer).param_groups
        assert trainer.get_lr() == matrices["lr"]
        rates.append(matrices["lr"])
        assert [group["lr"] for group in others] == pytest.approx([matrices["lr"] / 4] * 2)
    assert rates[2] == 0.02
    assert len({*rates}) == 9


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "amp"])
def test_half_precision_trains_masters_in_single_precision(
    name: str, precision: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # fp16 is refused where there is no GPU.
    monkeypatch.setattr(rules, "refuse_to_train", lambda cfg: None)
    flags = (*(MUON if name == "muon" else ("--optimizer", "adamw", "--lr", "0.005")), *VANILLA)
    losses = [trained(trainer_of(data, *flags), [batches(1)[0]] * 6)]
    # fairseq's one vector of all parameters is made for GPUs alone; Muon has it keep their shapes.
    flat = {"fp16_no_flatten_grads": True} if name == "adamw" else {}
    trainer = trainer_of(data, *flags, **{precision: True}, **flat)
    losses.append(trained(trainer, [batches(1)[0]] * 6))
    # Eight bits of 2.9.
    assert losses[1] == pytest.approx(losses[0], abs=0.05)
    assert losses[1][-1] < losses[1][0] - 0.2
    masters = list(trainer.optimizer.params)
    assert all(master.dtype == torch.float32 for master in masters)
    assert sum(master.numel() for master in masters) == sum(p.numel() for p in trainer.get_model().parameters())
    half = {"fp16": torch.float16, "bf16": torch.bfloat16, "amp": torch.float32}[precision]
    assert {parameter.dtype for parameter in trainer.get_model().parameters()} == {half}


@pytest.mark.parametrize("optimizer", [("--optimizer", "adamw", "--lr", "0.01"), MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=str)
def test_the_scores_of_heads_are_a_group_without_decay(
    precision: dict[str, bool], optimizer: tuple[str, ...], data: Path
) -> None:
    trainer = trainer_of(data, *VANILLA, "--qk-norm", "scaled", "--sinks", *optimizer, *OWN, **precision)
    *others, scores = trainer.optimizer.param_groups
    heads = trainer.get_model().decoder.core.config.heads
    assert [parameter.numel() for parameter in scores["params"]] == 4 * [heads]
    assert scores["weight_decay"] == 0.0
    assert {group["weight_decay"] for group in others} == {0.1}


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=str)
@pytest.mark.parametrize("first", ["adam", "muon"])
def test_a_checkpoint_of_another_optimizer_is_one_sentence(
    first: str, precision: dict[str, bool], data: Path, tmp_path: Path
) -> None:
    flags = {"muon": MUON, "adam": ("--optimizer", "adam", "--lr", "0.02")}
    one = trainer_of(data, *VANILLA, *flags.pop(first), **precision)
    trained(one, batches(1))
    one.consolidate_optimizer()
    one.save_checkpoint(str(tmp_path / "last.pt"), {"epoch": 1})
    (others,) = flags.values()
    other = trainer_of(data, *VANILLA, *others, **precision)
    with pytest.raises((AssertionError, ValueError)) as raised:
        other.load_checkpoint(str(tmp_path / "last.pt"))
    sentence = str(sentence_of(raised.value))
    assert sentence.startswith("--save-dir must hold the state of the same --optimizer")
    assert all(spelled in sentence for spelled in ("--reset-optimizer", "checkpoint.reset_optimizer=true"))
    other.load_checkpoint(str(tmp_path / "last.pt"), reset_optimizer=True)


def test_muon_without_a_matrix_is_one_sentence(data: Path) -> None:
    cfg = parsed(str(data), *VANILLA, *MUON).optimizer
    sentence = "--optimizer muon must be left out where there are no matrices of layers: got 2 other parameters"
    with pytest.raises(UsageError, match=sentence):
        of_torch.FairseqMuon(cfg, torch.nn.Linear(2, 2).parameters())


def test_muon_is_for_models_of_this_package_and_a_torch_that_has_it(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = parsed(str(data), *VANILLA, *MUON)
    with pytest.raises(
        UsageError, match="--optimizer muon knows the matrices of fairseq_ms's models alone: got Linear"
    ):
        of_torch.prepare_muon(cfg, torch.nn.Linear(2, 2))
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UsageError, match=r"--optimizer muon needs torch 2.9 or newer: this is torch \d"):
        of_torch.prepare_muon(cfg, MODEL)


@pytest.mark.parametrize(
    ("name", "value"), [("no_nesterov", True), ("adjust_lr_fn", "match_rms_adamw"), ("muon_momentum", 0.9)]
)
def test_a_training_with_a_flag_that_is_gone_goes_on_only_if_it_had_the_value_that_is_left(
    name: str, value: Any, data: Path, tmp_path: Path
) -> None:
    flags, path = (*VANILLA, *MUON), str(tmp_path / "checkpoint_last.pt")
    first = trainer_of(data, *flags)
    first.consolidate_optimizer()
    first.save_checkpoint(path, {"train_iterator": {"epoch": 1}})
    left = {"no_nesterov": False, "adjust_lr_fn": "original", "muon_momentum": 0.95}
    for had, refused in ((left, False), ({**left, name: value}, True)):
        state = torch.load(path)
        state["cfg"]["optimizer"].update(had)
        torch.save(state, path)
        trainer, spelled = trainer_of(data, *flags), f"--{name.replace('_', '-')} {value}"
        if refused:
            with pytest.raises(UsageError, match=rf"^--\S+ must hold a training without .*\({spelled}; "):
                trainer.load_checkpoint(path)
            trainer = trainer_of(data, *flags)
        trainer.load_checkpoint(path, reset_optimizer=refused)
