"""What a user sees of a mistake: one sentence and a non-zero exit code; of a bug: its traceback."""

import socket
from datetime import timedelta

import numpy as np
import pytest
import torch
from fairseq.data import ListDataset, data_utils
from fairseq.data.iterators import EpochBatchIterator
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from fairseq_ms.errors import UsageError
from fairseq_ms.host.errors import sentence_of
from tests.helpers.cli import USER_DIR, run_cli
from tests.helpers.corpus import train_command, write_corpus

LETTERS = "".join(f"{letter} 1\n" for letter in "abcdefgh")


@pytest.fixture
def data(tmp_path):
    """A data folder that is complete up to its dictionary: enough to get as far as building the model."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "dict.txt").write_text(LETTERS, encoding="utf-8")
    return folder


def train(data, *flags, check=False):
    """A `fairseq-train` in a folder of its own, beside the data."""
    return run_cli(
        "fairseq-train", data, "--user-dir", USER_DIR, "--task", "language_modeling", "--arch", "retina_lm",
        "--tokens-per-sample", "32", "--batch-size", "2", "--optimizer", "adam", "--lr", "0.001", "--cpu",
        "--max-update", "1", "--save-dir", "checkpoints", *flags,
        cwd=data.parent, check=check,
    )  # fmt: skip


def assert_nothing_written(data):
    """Neither a file nor a folder beside the data."""
    assert [path for path in data.parent.iterdir() if path != data] == []


def assert_one_sentence(done, command, *parts):
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{command}: error: ")
    for part in parts:
        assert part in line


def test_a_bad_flag_ends_training_with_one_sentence_and_nothing_written(data):
    done = train(data, "--scale-windows", "4x=0:8")
    assert_one_sentence(done, "fairseq-train", "--scale-windows", "1x", "'4x=0:8'")
    assert "_name" not in done.stdout
    assert_nothing_written(data)


def test_a_bad_setting_ends_hydra_training_with_one_sentence(data):
    done = run_cli(
        "fairseq-hydra-train", "task=language_modeling", f"task.data={data}", "task.tokens_per_sample=32",
        "+model._name=retina_lm", "+model.scale_windows='4x=0:8'", f"common.user_dir={USER_DIR}", "common.cpu=true",
        "dataset.batch_size=2", "criterion=cross_entropy", "optimizer=adam", "optimization.lr=[0.001]",
        "lr_scheduler=fixed", "optimization.max_update=1",
        cwd=data.parent, check=False,
    )  # fmt: skip
    # hydra and fairseq write to stderr before the plugin is loaded, so the sentence is the last line there.
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("fairseq-hydra-train: error: --scale-windows must have")


def test_a_data_folder_without_a_dictionary_gets_one_sentence(data):
    (data / "dict.txt").unlink()
    assert_one_sentence(train(data), "fairseq-train", "fairseq-preprocess", str(data / "dict.txt"))
    assert_nothing_written(data)


def test_a_missing_subset_gets_one_sentence(data):
    done = train(data, "--valid-subset", "dev")
    assert_one_sentence(done, "fairseq-train", "there is no dev", str(data / "dev.bin"))
    assert_nothing_written(data)


def test_half_precision_without_a_gpu_gets_one_sentence_and_bfloat16_trains(tmp_path):
    data = write_corpus(tmp_path)
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    done = run_cli(*train_command("vanilla_lm", data, tmp_path / "checkpoints", "--fp16"), env=hidden, check=False)
    assert_one_sentence(done, "fairseq-train", "--fp16 must be left out")
    # fairseq takes it for a TPU's.
    done = run_cli(*train_command("vanilla_lm", data, tmp_path / "checkpoints", "--bf16"), env=hidden)
    assert "'bf16': True" in done.stdout
    assert "'tpu': True" not in done.stdout
    assert (tmp_path / "checkpoints" / "checkpoint_last.pt").is_file()


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--tpu", "--tpu needs the package torch_xla, which is not installed"),
        ("--self-target", "--self-target and --past-target must be left out: the models predict the next token alone"),
    ],
)
def test_a_flag_for_other_machines_or_models_gets_one_sentence(flag, sentence, tmp_path):
    data = write_corpus(tmp_path)
    done = run_cli(*train_command("vanilla_lm", data, tmp_path / "checkpoints", flag), check=False)
    assert_one_sentence(done, "fairseq-train", sentence)


def test_a_line_that_is_longer_than_the_positions_gets_one_sentence(tmp_path):
    data = write_corpus(tmp_path)
    flags = ("--sample-break-mode", "eos", "--tokens-per-sample", "6", "--max-update", "1")
    done = run_cli(*train_command("vanilla_lm", data, tmp_path / "checkpoints", *flags), check=False)
    assert_one_sentence(done, "fairseq-train", "--tokens-per-sample", "--sample-break-mode none", "7 tokens", "6 fit")


def test_an_ensemble_to_score_with_gets_one_sentence(data):
    done = run_cli("fairseq-eval-lm", data, "--user-dir", USER_DIR, "--path", "a.pt:b.pt", "--cpu", check=False)
    assert "Traceback" not in done.stderr
    sentence = "--path must be a single checkpoint here, since fairseq makes ensembles only for fairseq-generate and "
    last = f"fairseq-eval-lm: error: {sentence}fairseq-interactive: got a.pt:b.pt"
    assert done.stderr.splitlines()[-1] == last


def test_a_missing_checkpoint_gets_one_sentence(data):
    done = run_cli("fairseq-eval-lm", data, "--user-dir", USER_DIR, "--path", "none.pt", "--cpu", check=False)
    # fairseq-eval-lm logs to stderr, so the sentence is the last line there.
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    sentence = "--path must name a checkpoint: none.pt does not exist"
    assert done.stderr.splitlines()[-1] == f"fairseq-eval-lm: error: {sentence}"


def test_a_bug_keeps_its_traceback():
    program = "import fairseq_ms; raise ValueError('a bug')"
    done = run_cli("python", "-c", program, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ValueError: a bug\n")


def test_an_environment_variable_shows_the_traceback_of_a_mistake_as_well():
    program = "import fairseq_ms, fairseq_ms.errors; raise fairseq_ms.errors.UsageError('--x must be 1: got 2')"
    done = run_cli("python", "-c", program, env={"FAIRSEQ_MS_TRACEBACK": "1"}, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("\n-c: error: --x must be 1: got 2\n")


SPAWN = """
import sys
import torch.multiprocessing
import fairseq_ms
from fairseq_ms.errors import UsageError

def work(rank):
    if rank == 1:
        raise UsageError("--mem-len must be at least 1: got 0")

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""


def test_a_mistake_found_in_a_spawned_process_is_one_sentence_of_the_parent(tmp_path):
    (tmp_path / "several.py").write_text(SPAWN, encoding="utf-8")
    done = run_cli("python", tmp_path / "several.py", check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "several: error: --mem-len must be at least 1: got 0"


def spawned(text):
    return ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\n{text}", 1, 2)


GLOO = "--distributed-backend must be gloo on machines without GPUs"
NO_GPU = "--fp16 must be left out on a machine without a GPU"
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    f()\n'


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UsageError("--a must\n be b: got c"), "--a must be b: got c"),
        (UsageError(f"Caught UsageError in DataLoader worker.\n{TRACE}fairseq_ms.errors.UsageError: no"), "no"),
        (spawned(f"{TRACE}fairseq_ms.errors.UsageError: --x: got 3\n"), "--x: got 3"),
        (spawned(f"{TRACE}RuntimeError: UsageError: no\n"), None),
        (spawned(f"{TRACE}ValueError: --x: got 3\n"), None),
        (ValueError("--x: got 3"), None),
        (AssertionError("Torch not compiled with CUDA enabled"), f"{NO_GPU}: this torch is built for CPUs only"),
        (RuntimeError("Found no NVIDIA driver on your system. Please ..."), f"{NO_GPU}: torch finds none"),
        (RuntimeError("The NVIDIA driver on your system is too old (found ..."), f"{NO_GPU}: torch finds none"),
        (RuntimeError("No CUDA GPUs are available"), f"{NO_GPU}: torch finds none"),
        (RuntimeError("CUDA out of memory."), None),
        (AttributeError("'NoneType' object has no attribute 'device'"), None),
        (
            AssertionError("world size is 2 but have 0 available devices"),
            "--distributed-world-size must be at most the number of GPUs here, 0, unless a launcher such as torchrun "
            "starts the processes: got 2",
        ),
        (RuntimeError("Distributed package doesn't have NCCL built in"), f"{GLOO}: got nccl"),
        (ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"), f"{GLOO}: got nccl"),
        (
            ImportError("\n\nPlease install the fairscale package:\n\n  pip install fairscale"),
            "--ddp-backend slowmo and --zero-sharding os need the package fairscale, which is not installed",
        ),
        (ImportError("cannot import name 'a' from 'b'"), None),
        (
            spawned(f"{TRACE}ImportError: Cannot find SlowMoDistributedDataParallel. Please install fairscale with:"),
            "--ddp-backend slowmo and --zero-sharding os need the package fairscale, which is not installed",
        ),
        (
            ProcessExitedException("process 1 terminated with signal SIGKILL", 1, 7, -9, "SIGKILL"),
            "process 1 of this run was ended by SIGKILL, often because memory has run out; the same command goes on "
            "from the last checkpoint",
        ),
        (ProcessExitedException("process 1 terminated with exit code 3", 1, 7, 3), None),
        (FileNotFoundError(2, "No such file or directory", "some.py"), None),
        (
            AssertionError("Sentences lengths should not exceed max_tokens=5"),
            "--max-tokens must be at least the length of the longest sample, --tokens-per-sample or that of a line "
            "with --sample-break-mode eos or complete: got 5",
        ),
        (
            Exception("AdaptiveLoss is not compatible with the PyTorch version of DistributedDataParallel. Please"),
            "--ddp-backend must be legacy_ddp with --criterion adaptive_loss",
        ),
        (
            RuntimeError(
                "[/p/gloo/transport/tcp/pair.cc:537] Read error [::1]:4061: Connection reset by peer. This is"
            ),
            "another process of this run has ended, and its own output says why; the same command goes on from the "
            "last checkpoint",
        ),
        (
            RuntimeError(
                "Gloo connectFullMesh failed with [/p/gloo/transport/tcp/pair.cc:152] SO_ERROR: Connection refused"
            ),
            "another process of this run has ended, and its own output says why; the same command goes on from the "
            "last checkpoint",
        ),
        (RuntimeError("Connection reset by peer"), None),
        (ConnectionResetError(104, "Connection reset by peer"), None),
        (
            RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed. "),
            "--num-workers: a process that reads data is killed by signal: Killed, often because memory has run out; "
            "the same command goes on from the last checkpoint",
        ),
        (
            RuntimeError("DataLoader worker (pid(s) 17, 18) exited unexpectedly"),
            "--num-workers: a process that reads data exited unexpectedly, often because memory has run out; the same "
            "command goes on from the last checkpoint",
        ),
        (
            RuntimeError("Cannot resume training due to dataloader mismatch, please report this to the"),
            "--restore-file must have been written in an epoch of the same batches to be continued: keep the data, "
            "--sample-break-mode, --tokens-per-sample, --batch-size and --max-tokens, or use --reset-dataloader to "
            "begin a new epoch",
        ),
        (
            Exception("Cannot load model parameters from checkpoint a/b.pt; please ensure that the ..."),
            "--restore-file must hold a model of the same --arch, --positions and sizes: a/b.pt does not fit this one",
        ),
    ],
)
def test_mistakes_have_a_sentence_and_bugs_have_none(error, sentence):
    assert sentence_of(error) == sentence


def test_weights_in_shards_are_refused_before_anything_is_written(data):
    done = train(data, "--ddp-backend", "fully_sharded")
    assert_one_sentence(done, "fairseq-train", "--ddp-backend must be pytorch_ddp or legacy_ddp", "got fully_sharded")
    assert_nothing_written(data)


@pytest.mark.parametrize(
    ("address", "rank", "sentence"),
    [
        ("tcp://127.0.0.1:{taken}", 0, "--distributed-port must be free where the first process runs"),
        ("tcp://127.0.0.1:{free}", 0, "--distributed-world-size 2 says that so many processes are started: 1 had come"),
        ("tcp://127.0.0.1:{free}", 1, "the first process of this run must be reachable: nobody answers at 127.0.0.1:"),
    ],
)
def test_processes_that_do_not_meet_are_told_so(address, rank, sentence):
    """What torch itself raises, which waits for half an hour unless told otherwise."""
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other.bind(("127.0.0.1", 0))
        ports = {"taken": taken.getsockname()[1], "free": other.getsockname()[1]}
        other.close()
        with pytest.raises(RuntimeError) as raised:
            torch.distributed.init_process_group(
                "gloo", init_method=address.format(**ports), rank=rank, world_size=2, timeout=timedelta(seconds=1)
            )
    found = sentence_of(raised.value)
    assert found is not None
    assert sentence in found


def test_data_that_fill_no_batch_are_refused_in_one_sentence() -> None:
    """fairseq's own iterator over one sample, of which the default multiple of 8 leaves no batch."""
    batches = data_utils.batch_by_size(
        np.arange(1), None, num_tokens_vec=np.array([5]), max_sentences=4, required_batch_size_multiple=8
    )
    with pytest.raises(Exception, match="The dataset is empty") as raised:
        _ = EpochBatchIterator(ListDataset([torch.ones(5)]), torch.stack, list(batches)).first_batch
    assert sentence_of(raised.value) == (
        "DATA must fill a batch: a last batch whose size is no multiple of --required-batch-size-multiple is left out, "
        "and so are samples without room"
    )
