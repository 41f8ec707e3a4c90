"""What a user sees of a mistake: one sentence, a non-zero exit code and nothing written; of a bug: its traceback."""

from __future__ import annotations

import functools
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, options
from fairseq.data import ListDataset, data_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.models import MODEL_REGISTRY
from fairseq_cli import train
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError
from torch.multiprocessing import ProcessRaisedException

from fairseq_ms.errors import UsageError, sentence_of
from fairseq_ms.host import rules
from tests.helpers.asked import assert_refused
from tests.helpers.cli import USER_DIR, run_cli
from tests.helpers.forked import run
from tests.helpers.resumed import TINY, tiny_training
from tests.helpers.trained import configuration as parsed
from tests.tools.test_lock import holding

MODEL = ("--arch", "vanilla_lm", *TINY, "--decoder-layers", "1", "--max-update", "1")
STREAMS = "--task streaming_language_modeling --arch transformer_xl"
LINEAR = "--criterion linear_cross_entropy"
MATRIX = f"{LINEAR} needs a model whose logits are its features times one matrix: got a "


@pytest.mark.parametrize("flags", ["--arch retina_lm --scale-windows 4x=0:8", "--valid-subset dev"])
def test_a_refused_training_prints_one_sentence_and_writes_nothing(flags: str, data: Path, tmp_path: Path) -> None:
    log, save = tmp_path / "log", tmp_path / "runs" / "mine"
    assert run(tiny_training([data], save, *MODEL, *flags.split()), log) == [1]
    printed = log.read_text()
    assert "_name" not in printed, "the configuration is printed"
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith("fairseq-train: error: ")
    assert not save.parent.exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--arch retina_lm --scale-windows 4x=0:8", "--scale-windows must"),
        ("--valid-subset dev", "DATA must .*Dataset not found: dev"),
        ("--ddp-backend fully_sharded", "--ddp-backend must be pytorch_ddp"),
        ("--write-checkpoints-asynchronously", "--write-checkpoints-asynchronously must"),
        ("--tokens-per-sample 0", "--tokens-per-sample must"),
        ("--criterion adaptive_loss", "--ddp-backend must be legacy_ddp"),
        ("--criterion adaptive_loss --ddp-backend legacy_ddp", "--adaptive-softmax-cutoff must"),
        ("--adaptive-softmax-cutoff 5", "--criterion must be adaptive_loss"),
        ("--past-target --future-target", "--self-target and --past-target must"),
        ("--output-dictionary-size 3", "--output-dictionary-size must"),
        ("--max-tokens 4", "--max-tokens must be at least --tokens-per-sample 5"),
        ("--max-tokens-valid 4", "--max-tokens-valid must be at least --tokens-per-sample 5"),
        (f"{STREAMS} --max-tokens-valid 4", "--max-tokens-valid must be at least --tokens-per-sample 5"),
        ("--seed -1", "--seed must be at least 0"),
        ("--seed 4294967296", "--seed must be"),
        ("--update-freq 0", "--update-freq must be at least 1"),
        ("--update-freq 2,0", "--update-freq must be at least 1"),
        ("--optimizer adam --adam-betas 3", "--adam-betas must"),
        ("--optimizer adam --adam-betas (0.9,1)", r"--adam-betas must be two numbers .*: got \(0.9,1\)"),
        ("--optimizer adamw --adam-betas high", "--adam-betas must be two numbers .*: got high"),
        ("--optimizer muon", "--adam-lr must be given with --optimizer muon"),
        ("--optimizer muon --adam-lr 0", "--adam-lr must be above 0 with --optimizer muon: got 0"),
        ("--optimizer muon --adam-lr inf", "--adam-lr must be above 0 with --optimizer muon: got inf"),
        ("--optimizer muon --adam-lr 1 --lr 0", "--lr must be above 0 with --optimizer muon: got 0"),
        ("--optimizer muon --adam-lr 1 --memory-efficient-bf16", "--memory-efficient-bf16 must .*--optimizer muon"),
        ("--optimizer muon --adam-lr 1 --zero-sharding os", "--zero-sharding os must .*--optimizer muon"),
        ("--task streaming_language_modeling", "--arch must be a model with a memory"),
        ("--arch transformer_xl", "--task must be streaming_language_modeling for a model with a memory"),
        (f"{STREAMS} --batch-size 0", "--batch-size must be at least 1, .*: got 0"),
        ("--num-shards 2 --shard-id 2", "--shard-id must be below --num-shards 2: got 2"),
        (f"{STREAMS} --tokens-per-sample 0", "--tokens-per-sample must be at least 1.*: got 0"),
        (f"{STREAMS} --add-bos-token", "--add-bos-token must not be set"),
        (f"{STREAMS} --max-target-positions 5", "--max-target-positions must not be set"),
        (f"{STREAMS} --train-subset nothing", "data must have a split named nothing"),
        (f"{LINEAR} --adaptive-softmax-cutoff 5", "--criterion must be adaptive_loss to train with .*-cutoff 5"),
        (f"{LINEAR} --arch transformer_lm --adaptive-softmax-cutoff 5,9", f"{MATRIX}Trans.* adaptive_loss trains"),
        (f"{LINEAR} --arch haed --position-embed-dim 4", f"{MATRIX}HAEDLanguageModel"),
        (f"{LINEAR} --arch lightconv_lm --decoder-kernel-size-list [3]", f"{MATRIX}LightConvLanguageModel"),
        *(
            (
                f"{loss} --unpredicted-symbols <s>",
                "--criterion must be cross_entropy, .* --unpredicted-symbols <s>: got",
            )
            for loss in (f"{LINEAR} --label-smoothing 0.1", "--criterion label_smoothed_cross_entropy")
        ),
        (f"{LINEAR} --find-unused-parameters", "--find-unused-parameters must not be given"),
        ("--criterion bag_of_words", "--criterion bag_of_words needs --arch coarse_lm, .*: got a VanillaLanguageModel"),
        ("--criterion in_batch_sampled_softmax --negative-batches -1", "--negative-batches must be at least 0: got -1"),
        ("--criterion in_batch_sampled_softmax", ".*first phase of haed and hred only: got a VanillaLanguageModel"),
        ("--lr -1", "--lr must be at least 0"),
        ("--num-workers -1", "--num-workers must be at least 0"),
        ("--dataset-impl lazy", "--dataset-impl must"),
    ],
)
def test_what_cannot_be_trained_has_a_sentence_before_anything_is_written(
    flags: str, named: str, data: Path, tmp_path: Path
) -> None:
    _, *arguments = tiny_training([data], tmp_path / "runs" / "mine", *MODEL, *flags.split())
    with pytest.raises(Exception) as raised:
        distributed_utils.call_main(parsed("language_modeling", arguments), train.main)
    assert re.match(named, str(sentence_of(raised.value)))
    assert not (tmp_path / "runs").exists()


def test_a_metric_that_no_validation_has_is_one_sentence_after_what_was_trained_is_saved(
    data: Path, tmp_path: Path
) -> None:
    flags = (*MODEL, "--best-checkpoint-metric", "bleu", "--valid-subset", "valid")
    assert run(tiny_training([data], tmp_path / "runs", *flags), tmp_path / "log") == [1]
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith("fairseq-train: error: --best-checkpoint-metric must be")
    assert (tmp_path / "runs" / "checkpoint_last.pt").is_file()


def unfilled(**task: Any) -> Any:
    """fairseq's defaults, of a training alone."""
    cfg: Any = OmegaConf.structured(FairseqConfig)
    cfg.task, cfg.distributed_training.distributed_world_size = task, 1
    return cfg


def elsewhere(folder: Path, rank: int) -> None:
    os.chdir(folder)


def test_a_relative_path_that_hydra_has_left_behind_is_told_from_a_missing_one(data: Path, tmp_path: Path) -> None:
    given = ["fairseq-hydra-train", "task=language_modeling", "+model._name=vanilla_lm", "dataset.batch_size=2"]
    given += [f"common.user_dir={USER_DIR}", "common.cpu=true", f"hydra.run.dir={tmp_path}/job"]
    for folder, absolute in ((data.name, True), ("none", False)):
        fault = functools.partial(elsewhere, data.parent)
        assert run([*given, f"task.data={folder}"], tmp_path / "log", 1, fault) == [1]
        last = (tmp_path / "log").read_text().splitlines()[-1]
        assert last.startswith("fairseq-hydra-train: error: DATA must be as fairseq-preprocess wrote it")
        assert ("absolute path" in last) == absolute


def test_what_cannot_be_trained_or_scored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = unfilled(tokens_per_sample=1)
    rules.refuse_to_train(cfg)
    cfg.eval_lm.context_window = 8
    with pytest.raises(UsageError, match="must be 1 more than --context-window 8: got 1"):
        rules.refuse(cfg)
    cfg = unfilled()
    cfg.eval_lm.softmax_batch = -5
    with pytest.raises(UsageError, match="--softmax-batch must be at least 0: got -5"):
        rules.refuse(cfg)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = unfilled()
    rules.refuse_to_train(cfg)
    cfg.common.fp16 = True
    with pytest.raises(UsageError, match="--fp16 must be left out on a machine without a GPU: torch finds none"):
        rules.refuse_to_train(cfg)


@pytest.mark.parametrize(("folder", "data", "what"), [("none", "here", "model's"), ("here", "none", "data")])
def test_a_missing_folder_of_a_model_or_data_is_named(folder: str, data: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(UsageError, match=f"from_pretrained: the {what} folder .*none does not exist"):
        MODEL_REGISTRY["retina_lm"].from_pretrained(str(tmp_path / folder), "model.pt", str(tmp_path / data))


HYDRA = (
    "fairseq-hydra-train task=language_modeling task.data={data} task.tokens_per_sample=32 +model._name=retina_lm "
    "+model.scale_windows='4x=0:8' common.user_dir={user_dir} common.cpu=true dataset.batch_size=2 "
    "criterion=cross_entropy optimizer=adam optimization.lr=[0.001] lr_scheduler=fixed optimization.max_update=1 "
    "hydra.run.dir={place}"
)


TASK = "--user-dir {user_dir} --task language_modeling"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (HYDRA, "--scale-windows must"),
        ("fairseq-eval-lm {data} --user-dir {user_dir} --path none.pt --cpu", "--path must .*none.pt"),
        (f"fairseq-train {{place}} --batch-size 1 {TASK} --arch vanilla_lm", "DATA must .*dict.txt"),
    ],
    ids=["hydra", "eval-lm", "no dictionary"],
)
def test_other_commands_end_with_one_sentence(command: str, named: str, data: Path, tmp_path: Path) -> None:
    given = command.format(data=data, user_dir=USER_DIR, place=tmp_path).split()
    assert run(given, tmp_path / "log") == [1]
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    assert re.match(f"{given[0]}: error: {named}", printed.splitlines()[-1])


def test_a_bug_keeps_its_traceback_and_a_mistake_shows_it_where_it_is_asked_for() -> None:
    done = run_cli("python", "-c", "import fairseq_ms.models; raise ValueError('a bug')", check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ValueError: a bug\n")
    program = "import fairseq_ms.models, fairseq_ms.errors; raise fairseq_ms.errors.UsageError('--x must be 1: got 2')"
    done = run_cli("python", "-c", program, env={"FAIRSEQ_MS_TRACEBACK": "1"}, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.splitlines()[-1] == "-c: error: --x must be 1: got 2"


FIT = "flags of generation must fit together"
FINITE = "--path must name a checkpoint of finite weights"
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    f()\n'


def spawned(text: str) -> ProcessRaisedException:
    return ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\n{TRACE}{text}", 1, 2)


def test_a_prepared_folder_is_told_that_its_data_are_in_bin(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dict.txt").touch()
    error = FileNotFoundError(2, "No such file or directory", str(tmp_path / "dict.txt"))
    assert f"did you mean {tmp_path}/bin?" in str(sentence_of(error))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UsageError("--a must\n be b: got c"), "--a must be b: got c"),
        (UsageError(f"Caught UsageError in DataLoader worker.\n{TRACE}fairseq_ms.errors.UsageError: no"), "no"),
        (spawned("fairseq_ms.errors.UsageError: --x: got 3\n"), "--x: got 3"),
        (spawned("RuntimeError: UsageError: no\n"), None),
        (spawned("ValueError: --x: got 3\n"), None),
        (ValueError("--x: got 3"), None),
        (RuntimeError("CUDA out of memory."), None),
        (ValueError("logits must be finite"), f"{FINITE} (logits must be finite)"),
        (FileNotFoundError(2, "No such file or directory", "some.py"), None),
        (
            SyntaxError("'{' was never closed (<unknown>, line 1)"),
            "--model-overrides must be a dictionary as Python writes it, such as {'data': 'FOLDER'} "
            "('{' was never closed (<unknown>, line 1))",
        ),
        (
            RuntimeError("Distributed package doesn't have NCCL built in"),
            "--distributed-backend (distributed_training.distributed_backend) must be gloo on a machine without a GPU "
            "(Distributed package doesn't have NCCL built in)",
        ),
        (SyntaxError("invalid syntax (model.py, line 1)"), None),
        (AssertionError("--temperature must be greater than 0"), f"{FIT} (--temperature must be greater than 0)"),
    ],
)
def test_mistakes_have_a_sentence_and_bugs_have_none(error: Exception, sentence: str | None) -> None:
    assert sentence_of(error) == sentence


def test_a_beam_of_no_hypotheses_is_one_sentence() -> None:
    ours = object.__new__(MODEL_REGISTRY["retina_lm"])
    with pytest.raises(UsageError, match="--beam must be at least 1: got 0"):
        rules.build_generator(lambda *given: None, None, [ours], Namespace(beam=0))
    with pytest.raises(UsageError, match=r"--no-repeat-ngram-size must be left out, since .*: got 2"):
        rules.build_generator(lambda *given: None, None, [ours], Namespace(no_repeat_ngram_size=2))


def test_what_predicts_bags_of_words_writes_no_text(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sample", str(models / "coarse" / "model.pt"), "--prompt", "w1"]
    assert_refused(command, "CHECKPOINT must hold a model that predicts the next token", capsys)


def test_data_without_rows_are_refused_in_one_sentence() -> None:
    """fairseq's own iterator over none; with fairseq's multiple of 8, making batches of it would end in a traceback."""
    batches = data_utils.batch_by_size(
        np.arange(0), None, num_tokens_vec=np.arange(0), max_sentences=4, required_batch_size_multiple=8
    )
    with pytest.raises(Exception, match="The dataset is empty") as raised:
        _ = EpochBatchIterator(ListDataset([]), torch.stack, list(batches)).first_batch
    assert str(sentence_of(raised.value)).startswith("DATA must have rows")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--arch retina_ml", "--arch must be .* retina_lm .*: got 'retina_ml'"),
        ("--arch zzzzzz", "--arch must be .* --help"),
        ("--ddp-backend gloo", "--ddp-backend must be one of c10d, "),
        ("--arch retina_lm --decoder-embed-dm 1", "--decoder-embed-dm is no flag .* --decoder-embed-dim"),
        ("--arch retina_lm --decoder-embed-dm=1", "--decoder-embed-dm is no flag .* --decoder-embed-dim"),
        ("--arch retina_lm --zzzzzz 128", "--zzzzzz is no flag .*--help"),
        ("--arch retina_lm --tpu", "--tpu is no flag"),
        ("--arch transformer_ql --decoder-layers 2", "--decoder-layers is no flag .* --scale-layers"),
        (
            "--arch retina_lm --task translation --tokens-per-sample 8",
            "--tokens-per-sample .* --task language_modeling",
        ),
        ("--arch vanilla_lm --mem-len 8", "--mem-len is no flag .* --arch compressive_transformer or"),
        ("--arch vanilla_lm --warmup-init-lr 1", "--warmup-init-lr is no flag .* --lr-scheduler cosine or"),
        ("--tokens-per-sample 8", "--arch must be given"),
        ("--arch retina_lm --lr", ".*--lr"),
        ("--arch retina_lm and more", ".*and more"),
    ],
)
def test_what_the_parser_does_not_know_is_one_sentence(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = options.get_training_parser(default_task="language_modeling")
    with pytest.raises(SystemExit) as end:
        options.parse_args_and_arch(parser, ["data", *flags.split()])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"{parser.prog}: error: {said}", line)


@pytest.mark.parametrize("arch", ["retina_lm", "transformer_xl"])
def test_a_forgotten_task_is_named(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InterpolationKeyError) as raised:
        parsed("translation", ["data", "--arch", arch])
    assert str(sentence_of(raised.value)).startswith("--task must be one of language modelling")
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(options.get_validation_parser(), ["data", "--path", "none.pt"])
    assert "error: --task must be given" in capsys.readouterr().err


@pytest.mark.parametrize("there", [False, True])
def test_looking_whether_a_folder_can_be_written_leaves_it_as_it_was(there: bool, tmp_path: Path) -> None:
    """But for what a killed run has left half written."""
    folder = tmp_path / "runs" / "mine"
    if there:
        folder.mkdir(parents=True)
        for name in ("checkpoint_1_20.pt.tmp", "checkpoint.best_loss_3.1250.pt.tmp", "mine.tmp", "checkpoint1.pt"):
            (folder / name).touch()
    checkpoint_utils.verify_checkpoint_directory(str(folder))
    assert (tmp_path / "runs").exists() == there
    if there:
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoint1.pt", "mine.tmp"]
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--save-dir must be a folder in which files can be made"):
        checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "file" / "mine"))


def test_a_folder_that_another_training_writes_to_is_refused_and_left_as_it_is(data: Path, tmp_path: Path) -> None:
    save, log = tmp_path / "run", tmp_path / "log"
    other = holding(save)
    try:
        (save / "checkpoint_1_2.pt.tmp").touch()
        before = sorted(save.iterdir())
        assert run(tiny_training([data], save, *MODEL), log) == [1]
        assert log.read_text().splitlines()[-1].startswith("fairseq-train: error: --save-dir must be a folder that no ")
        assert run(tiny_training([data], save, *MODEL, "--no-save"), log) == [0]
        assert sorted(save.iterdir()) == before
    finally:
        other.kill()
        other.wait()
    assert run(tiny_training([data], save, *MODEL), log) == [0]
    assert sorted(path.name for path in save.iterdir()) == ["checkpoint_best.pt", "checkpoint_last.pt"]
