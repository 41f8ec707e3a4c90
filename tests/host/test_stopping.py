"""A run that is asked to stop saves and ends, and the same command goes on as if nothing had happened."""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fairseq_cli.train
import pytest
import torch
from fairseq.trainer import Trainer
from torch.multiprocessing import ProcessExitedException

from fairseq_ms.errors import UsageError
from fairseq_ms.host import launch, rules, saving
from tests.helpers import faults
from tests.helpers.cli import environment, run_cli
from tests.helpers.faults import strike
from tests.helpers.forked import Fault, curve, rank_log, run
from tests.helpers.resumed import TINY, assert_same_weights, tiny_training, write_parts
from tests.helpers.trained import configuration

FLAGS = ("--arch", "vanilla_lm", *TINY, "--decoder-layers", "1", "--max-epoch", "3", "--log-interval", "2")


@pytest.fixture(scope="module")
def whole(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted runs, of one process and of two."""
    place = tmp_path_factory.mktemp("whole")
    for ranks in (1, 2):
        assert run(tiny_training(folders, place / str(ranks), *FLAGS), place / f"{ranks}.log", ranks) == [0] * ranks
    return place


def assert_stops_and_goes_on(
    fault: Fault, signum: int, ranks: int, folders: list[Path], whole: Path, place: Path, *more: str
) -> None:
    """Under the fault, until the run ends by itself: the same losses and weights, each printed once."""
    printed: dict = {}
    command = tiny_training(folders, place / "run", *FLAGS, *more)
    expected = curve(whole / f"{ranks}.log")
    for start in range(20):
        log = place / f"{start}.log"
        codes = run(command, log, ranks, fault)
        assert "Traceback" not in log.read_text(), log.read_text()
        again = curve(log)
        assert not set(again) & set(printed), "what was printed is printed again"
        printed |= again
        if codes == [0] * ranks:
            break
        assert codes == [128 + signum] * ranks, (codes, log.read_text())
        assert f"stopped by {signal.Signals(signum).name} after update" in log.read_text()
    assert codes == [0] * ranks
    assert start > 0, "the run was never asked"
    assert printed == expected
    assert_same_weights(whole / str(ranks), place / "run")


def of_two(*row: object) -> object:
    return pytest.param(*row, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("moment", "count", "signum", "asked", "ranks"),
    [
        ("forward", 60, signal.SIGTERM, (0,), 1),
        ("update", 3, signal.SIGTERM, (0,), 1),
        ("update", 5, signal.SIGUSR1, (0,), 1),
        ("update", 4, signal.SIGINT, (0,), 1),
        ("validation", 3, signal.SIGTERM, (0,), 1),
        ("between epochs", 1, signal.SIGTERM, (0,), 1),
        of_two("forward", 60, signal.SIGTERM, (0,), 2),
        of_two("update", 3, signal.SIGTERM, (1,), 2),
        of_two("validation", 2, signal.SIGINT, (0, 1), 2),
    ],
)
def test_all_ranks_stop_after_the_same_update_wherever_and_whoever_is_asked(
    moment: str, count: int, signum: int, asked: tuple, ranks: int, folders: list[Path], whole: Path, tmp_path: Path
) -> None:
    fault = functools.partial(strike, moment, count, signum, asked)
    assert_stops_and_goes_on(fault, signum, ranks, folders, whole, tmp_path)


def interrupt_twice(echo: float, rank: int) -> None:
    """SIGINT twice within the same forward pass, the second one by hand if it is later than ``echo`` seconds."""
    launch._ECHO = echo
    for count in (60, 61):
        strike("forward", count, signal.SIGINT, (0,), rank)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_second_sigint_ends_at_once_unless_a_launcher_has_handed_on_the_first(
    by_hand: bool, folders: list[Path], tmp_path: Path
) -> None:
    fault = functools.partial(interrupt_twice, 0.0 if by_hand else 60.0)
    assert run(tiny_training(folders, tmp_path / "run", *FLAGS), tmp_path / "log", 1, fault) == [1 if by_hand else 130]
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    assert ("interrupted" in printed, (tmp_path / "run").exists()) == (by_hand, not by_hand)


def due_on(late: int, rank: int) -> None:
    """A checkpoint is due after every update by the clock of one rank alone; all die within the sixth."""
    saving.LONGEST = 0.0 if rank == late else math.inf
    faults._after(Trainer, "consolidate_optimizer", lambda: print("all ranks save", flush=True))
    kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
    faults._before(Trainer, "train_step", faults._turn(6, kill))


@pytest.mark.parametrize(("ranks", "late"), [(1, 0), (2, 0), (2, 1)])
def test_a_checkpoint_that_is_due_is_saved_by_all_ranks_whoever_has_looked_at_the_clock(
    ranks: int, late: int, folders: list[Path], whole: Path, tmp_path: Path
) -> None:
    command = tiny_training(folders, tmp_path / "run", *FLAGS)
    assert run(command, tmp_path / "log", ranks, functools.partial(due_on, late)) == [-signal.SIGKILL] * ranks
    assert {rank_log(tmp_path / "log", rank).read_text().count("all ranks save") for rank in range(ranks)} == {5}
    saved = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)
    assert saved["optimizer_history"][-1]["num_updates"] == 5
    assert run(command, tmp_path / "again", ranks) == [0] * ranks
    assert_same_weights(whole / str(ranks), tmp_path / "run")


LIMITS = {"--max-update": (3, 5), "--max-epoch": (1, 2), "--patience": (1, 20), "--stop-time-hours": (1e-6, 1)}


@pytest.mark.parametrize(("flag", "ranks"), [*((flag, 1) for flag in LIMITS), ("--max-update", 2)])
def test_a_finished_run_that_is_repeated_changes_nothing_says_so_and_goes_on_with_a_larger_limit(
    flag: str, ranks: int, folders: list[Path], tmp_path: Path
) -> None:
    reached, larger = LIMITS[flag]
    # A rate by which no validation is better than the first.
    more = ("--lr", "3", "--max-epoch", "8") if flag == "--patience" else ("--max-epoch", "4")
    command = tiny_training(folders, tmp_path / "run", *FLAGS, *more)
    assert run([*command, flag, str(reached)], tmp_path / "first", ranks) == [0] * ranks
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "run").iterdir()}
    assert run([*command, flag, str(reached)], tmp_path / "again", ranks) == [0] * ranks
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "run").iterdir()} == before
    (said,) = re.findall("nothing to train.*", (tmp_path / "again").read_text())
    assert flag in said
    assert curve(tmp_path / "again") == {}
    assert run([*command, flag, str(larger)], tmp_path / "more", ranks) == [0] * ranks
    assert curve(tmp_path / "more")


@pytest.mark.parametrize(("parts", "changed"), [(1, 0), (2, 0), (2, 1)])
def test_a_finished_run_has_not_trained_on_other_data(parts: int, changed: int, tmp_path: Path) -> None:
    """Of sharded data, every part counts and not the one alone that would come next."""
    shards = write_parts(tmp_path / "corpus")[:parts]
    flags = (*FLAGS, "--max-epoch", "2")
    assert run(tiny_training(shards, tmp_path / "run", *flags), tmp_path / "log") == [0]
    other = shards[changed] = shutil.copytree(shards[changed], tmp_path / "other")
    tokens = (other / "train.bin").read_bytes()
    (other / "train.bin").write_bytes(tokens[:4] + bytes([tokens[4] ^ 1]) + tokens[5:])
    assert run(tiny_training(shards, tmp_path / "run", *flags), tmp_path / "log") == [1]
    said = (tmp_path / "log").read_text().splitlines()[-1]
    assert all(part in said for part in ("DATA must be", str(other), "--save-dir", "checkpoint.save_dir")), said


@pytest.mark.parametrize(("updates", "warned"), [(2, True), (3, False)])
def test_a_training_that_is_all_warm_up_is_warned_of(
    updates: int, warned: bool, folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    schedule = ("--lr-scheduler", "inverse_sqrt", "--warmup-updates", "2", "--max-update", str(updates))
    _, *arguments = tiny_training(folders, Path("none"), *FLAGS, *schedule)
    rules.warn_of_warmup(configuration("language_modeling", arguments))
    assert bool(re.search("--max-update .*--warmup-updates 2", caplog.text)) == warned


@pytest.mark.parametrize("flag", ["--no-save", "--no-last-checkpoints"])
def test_without_a_checkpoint_to_write_the_log_says_so(flag: str, folders: list[Path], tmp_path: Path) -> None:
    fault = functools.partial(strike, "update", 2, signal.SIGTERM, (0,))
    assert run(tiny_training(folders, tmp_path / "run", *FLAGS, flag), tmp_path / "log", 1, fault) == [143]
    assert f"not saved, since {flag} is given" in (tmp_path / "log").read_text()


def ask_all(rank: int) -> None:
    """SIGUSR1 after the fourth update, for the processes that read data, too, as from Slurm."""

    def act() -> None:
        for process in (*multiprocessing.active_children(), multiprocessing.current_process()):
            os.kill(process.pid or 0, signal.SIGUSR1)

    faults._after(Trainer, "train_step", faults._turn(4, act))


@pytest.mark.parametrize("buffer", ["0", "10"])
def test_data_workers_that_are_asked_too_go_on_until_the_update_is_done(
    buffer: str, folders: list[Path], whole: Path, tmp_path: Path
) -> None:
    more = ("--num-workers", "2", "--data-buffer-size", buffer)
    assert_stops_and_goes_on(ask_all, signal.SIGUSR1, 1, folders, whole, tmp_path, *more)


def test_a_run_that_is_done_when_it_is_asked_ends_well(folders: list[Path], whole: Path, tmp_path: Path) -> None:
    updates = max(int(step) for _, step in curve(whole / "1.log"))
    fault = functools.partial(strike, "update", updates, signal.SIGTERM, (0,))
    assert run(tiny_training(folders, tmp_path / "run", *FLAGS), tmp_path / "log", 1, fault) == [0]
    assert_same_weights(whole / "1", tmp_path / "run")


SPAWNING = """
import sys, torch
from fairseq_cli.train import cli_main

if __name__ == "__main__":
    # How fairseq counts the ranks that it starts by itself.
    torch.cuda.device_count = lambda: 2
    cli_main()
"""


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGINT], ids=lambda signum: signum.name)
def test_the_parent_of_the_ranks_hands_the_signal_on_and_ends_as_they_do(
    signum: int, folders: list[Path], tmp_path: Path
) -> None:
    """As fairseq starts several GPUs of one machine; here they are processes on the CPU."""
    (tmp_path / "several.py").write_text(SPAWNING)
    flags = ("--distributed-backend", "gloo", "--distributed-world-size", "2", "--distributed-port", "-1")
    more = ("--ddp-backend", "legacy_ddp", "--distributed-init-method", f"file://{tmp_path / 'rendezvous'}")
    forever = ("--max-epoch", "100000", "--no-save-optimizer-state")
    arguments = tiny_training(folders, tmp_path / "run", *FLAGS, *flags, *more, *forever)[1:]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, tmp_path / "several.py", *arguments], env=environment(), stdout=log, stderr=log
        )
        try:
            end = time.monotonic() + 300
            while "train_inner" not in (tmp_path / "log").read_text() and time.monotonic() < end:
                time.sleep(0.1)
            os.kill(process.pid, signum)
            assert process.wait(120) == 128 + signum, (tmp_path / "log").read_text()
        finally:
            process.kill()
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    assert f"stopped by {signal.Signals(signum).name} after update" in printed
    torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)


def look_afterwards(rank: int) -> None:
    """Who gets SIGTERM when training is over."""
    command = fairseq_cli.train.cli_main

    def then() -> None:
        command()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        print("as before")

    fairseq_cli.train.cli_main = then


def test_signals_are_the_users_again_when_training_is_over(folders: list[Path], tmp_path: Path) -> None:
    command = tiny_training(folders, tmp_path / "run", *FLAGS, "--max-update", "1")
    assert run(command, tmp_path / "log", fault=look_afterwards) == [0]
    assert "as before" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("signum", launch.SIGNALS, ids=lambda signum: signum.name)
def test_a_parent_ends_as_its_ranks_do_if_one_of_them_alone_was_asked(signum: int) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.end_as(ProcessExitedException("", error_index=0, error_pid=1, exit_code=128 + signum))
    assert ended.value.code == 128 + signum
    with pytest.raises(UsageError, match=f"process 1 of this run has ended with exit code -{int(signum)}, which"):
        launch.end_as(ProcessExitedException("", error_index=1, error_pid=1, exit_code=-signum))


LEAVING = """
import atexit, os, signal, sys
from fairseq_ms.host.launch import signals

atexit.register(os.kill, os.getpid(), signal.SIGINT)
signals.listen()
if sys.argv[1] == "asked":
    os.kill(os.getpid(), signal.SIGTERM)
signals.end()
try:
    sys.exit(143)
finally:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


@pytest.mark.parametrize("asked", [True, False])
def test_ctrl_c_after_sigterm_ends_a_process_that_is_leaving_without_a_traceback(asked: bool) -> None:
    """While it waits for the processes that read data."""
    done = run_cli("python", "-c", LEAVING, "asked" if asked else "alone", check=False)
    assert ("KeyboardInterrupt" in done.stderr) != asked, done.stderr
    assert done.returncode == (-signal.SIGINT if asked else 143)
