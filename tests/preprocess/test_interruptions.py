"""Runs that are killed, fail or meet another run in the same folder."""

import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest

from fairseq_ms_pipeline import run as pipeline
from fairseq_ms_pipeline.files import only_run_in
from fairseq_ms_pipeline.run import run
from tests.helpers.cli import ROOT, environment, run_cli
from tests.preprocess.sample import DATASET, job_of, tree, write_sample


def in_child(action) -> int:
    """Run `action` in a forked process and return the signal that ended it, 0 for none."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.parametrize("level", ["bpe", "hf_byte_bpe", "word"])
def test_a_run_killed_before_any_file_is_finished_ends_identical_when_started_again(tmp_path, level):
    """Every file takes its final name by os.replace: kill -9 just before each one of them."""
    tokenise = "none" if level == "hf_byte_bpe" else "moses"
    dataset = replace(DATASET, level=level, tokenise=tokenise, bpe_merges=20, shard_bytes=1000)
    source = write_sample(tmp_path / "sample.txt", lines=45)
    run(job_of(source, tmp_path / "whole", dataset))
    expected = tree(tmp_path / "whole")
    replace_file, finished = os.replace, 0

    def killing(at: int):
        count = 0

        def counted(old, new):
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            replace_file(old, new)

        return counted

    def interrupted(at: int, out: Path) -> None:
        os.replace = killing(at)
        run(job_of(source, out, dataset))

    while True:
        out = tmp_path / f"killed-{finished}"
        ended_by = in_child(lambda out=out, at=finished + 1: interrupted(at, out))
        if not ended_by:
            break
        assert ended_by == signal.SIGKILL
        partial = tree(out)
        assert "manifest.json" not in partial or set(expected) <= set(partial)
        assert in_child(lambda out=out: run(job_of(source, out, dataset))) == 0
        assert tree(out) == expected, f"killed before file {finished + 1}"
        finished += 1
    assert finished > 25


def test_finished_shards_are_not_done_again(tmp_path, monkeypatch):
    source = write_sample(tmp_path / "sample.txt")
    done: list[str] = []

    def counting(tokenised, *rest):
        if len(done) == 3 and stops:
            raise ValueError("stopped here")
        done.append(tokenised.name)
        return original(tokenised, *rest)

    original, stops = pipeline.segment_shard, True
    monkeypatch.setattr(pipeline, "segment_shard", counting)
    with pytest.raises(ValueError, match="stopped here"):
        run(job_of(source, tmp_path / "out"))
    stops = False
    manifest = run(job_of(source, tmp_path / "out"))
    assert len(done) == len(set(done)) == sum(counts["shards"] for counts in manifest["splits"].values())


def dying(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_one_sentence_and_the_next_run_finishes(tmp_path, monkeypatch):
    source = write_sample(tmp_path / "sample.txt")

    monkeypatch.setattr("fairseq_ms_pipeline.run.tokenise_shard", dying)
    with pytest.raises(ValueError, match="fewer --workers than 2"):
        run(job_of(source, tmp_path / "out", workers=2))
    monkeypatch.undo()
    run(job_of(source, tmp_path / "whole"))
    run(job_of(source, tmp_path / "out", workers=2))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_second_run_in_the_same_folder_at_the_same_time_is_refused(tmp_path):
    job = job_of(write_sample(tmp_path / "sample.txt"), tmp_path / "out")
    work = tmp_path / "out" / ".work"
    work.mkdir(parents=True)

    def refused() -> None:
        with pytest.raises(ValueError, match="another run is working"):
            run(job)

    with only_run_in(work):
        in_child(refused)
    run(job)


def test_a_command_with_workers_killed_at_work_can_be_started_again_at_once(tmp_path):
    """kill -9 of the command itself: its orphaned workers neither hold the folder's lock nor spoil its files."""
    source = write_sample(tmp_path / "sample.txt", lines=3000)
    script = ROOT / "preprocess" / "text" / "prepare.py"
    command = [sys.executable, str(script), "--input", str(source), "--documents", "blank", "--bpe-merges", "20"]
    command += ["--workers", "2", "--shard-mb", "0.01", "--quiet"]
    out = tmp_path / "out"
    started = [*command, "--out", str(out)]
    with subprocess.Popen(started, stdout=subprocess.DEVNULL, env=environment()) as killed:
        while len(list((out / ".work" / "text").glob("*.txt"))) < 3:
            assert killed.poll() is None, "the run must not end before it is killed"
            time.sleep(0.01)
        killed.kill()
    assert not (out / "manifest.json").exists()
    run_cli("python", *command[1:], "--out", out)
    run_cli("python", *command[1:], "--out", tmp_path / "whole")
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.parametrize("command", [["-m", "fairseq_ms", "prepare", "chars"], ["preprocess/chars/prepare.py"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_where_nobody_reads_what_it_prints_a_run_ends_in_silence(tmp_path, command, unbuffered) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("some words\n")
    more = ["--input", str(tmp_path), "--out", str(tmp_path / "out"), "--workers", "1", "--quiet"]
    env = {**environment(), "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, *command, *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_workers_end_by_ctrl_c_without_a_word() -> None:
    program = """
import time
from fairseq_ms_pipeline import workers

if __name__ == "__main__":
    print("begun", flush=True)
    list(workers.each(time.sleep, [(0,), (100,), (100,)], 3))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert printed.endswith("KeyboardInterrupt\n")
    assert printed.count("Traceback") == 1
    assert "Process " not in printed
