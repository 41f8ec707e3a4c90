"""Running fairseq's commands as a user would, with their output in a log and a progress bar on the screen."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
# Threads that wait for each other awake take the processor from another program that computes, and it from them.
PATIENT = {"OMP_WAIT_POLICY": "passive"}
_TRAINED = re.compile(r"train_inner \| (\{.*\})")


def program(name: str) -> list[str]:
    """How to start one of fairseq's commands in this environment."""
    return [sys.executable, str(Path(sys.executable).parent / name)]


def run(command: list[str], log: Path, text: str | None = None) -> str:
    """Run a command and return what it printed, which is also written to ``log``.

    Raises SystemExit with one sentence when the command fails.
    """
    done = subprocess.run(
        command,
        input=text,
        cwd=ROOT,
        env={**PATIENT, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    log.write_text(done.stdout)
    if done.returncode:
        raise SystemExit(f"demo: {Path(command[1]).name} failed ({_last_line(done.stdout)}); its output is in {log}")
    return done.stdout


def train(command: list[str], log: Path, updates: int, title: str) -> None:
    """Run ``fairseq-train`` to its last update, its losses in ``log``; a run that was stopped goes on."""
    bar = tqdm(total=updates, desc=f"  {title}", unit="update", dynamic_ncols=True, mininterval=0.5)
    environment = {**PATIENT, **os.environ, "PYTHONUNBUFFERED": "1"}
    with (
        log.open("a") as output,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        bar,
    ):
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            output.write(line)
            last = line if line.strip() else last
            for record in records(line):
                bar.set_postfix_str(f"loss {record['loss']} bits, {float(record['wps']):,.0f} tokens/s", refresh=False)
                bar.update(int(record["num_updates"]) - bar.n)
        process.wait()
        if process.returncode == 0:
            bar.update(updates - bar.n)
    if process.returncode < 0:
        raise SystemExit(
            f"demo: training {title} was killed by {signal.Signals(-process.returncode).name}; "
            f"the same command goes on with it (its output is in {log})"
        )
    if process.returncode:
        raise SystemExit(f"demo: training {title} failed ({last.strip()}); its output is in {log}")


def records(log: str) -> Iterator[dict[str, str]]:
    """fairseq's training records, in the order they were logged."""
    for match in _TRAINED.findall(log):
        yield json.loads(match)


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"
