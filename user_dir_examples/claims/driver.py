#!/usr/bin/env python3
"""Train and test the runs behind docs/papers/claims.md.

    python user_dir_examples/claims/driver.py TEXT --out runs/claims --jobs 2
    python user_dir_examples/claims/driver.py TEXT --out runs/claims --only streaming/xl/1 streaming/ql
    python user_dir_examples/claims/tables.py runs/claims/results.jsonl

TEXT has train/*.txt, valid/*.txt and test/*.txt, a document a file, such as novels. Every run is one process with one
thread; --jobs of them go on at a time, and share the GPU with --device cuda. A run that is done appends one line to
OUT/results.jsonl, with its curve and tests, and is not repeated; the same command goes on with runs that were
interrupted. --list prints the runs and the hours of one core that they take, and starts none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

import corpora
from fairseq_ms.papers.plot import curves
from runs import PARTS, RUNS, Run

EXAMPLES = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """A run with one of its seeds."""

    run: Run
    seed: int

    @property
    def name(self) -> str:
        """part/run/seed, as --only takes it."""
        return f"{self.run.full_name}/{self.seed}"

    def follows(self, other: Job) -> bool:
        """Whether this begins with the checkpoint of another."""
        return (other.run.part, other.run.name, other.seed) == (self.run.part, self.run.after, self.seed)

    def matches(self, text: str) -> bool:
        """Whether this is `text` or lies below it."""
        return self.name == text or self.name.startswith(f"{text}/")


class Driver:
    """Trains and tests; the only writer of a results file."""

    def __init__(self, text: Path, out: Path, most_updates: int | None, device: str = "cpu") -> None:
        self.text, self.out, self.most_updates, self.device = text, out, most_updates, device
        self.results = out / "results.jsonl"
        self.lock = threading.Lock()
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def done(self) -> set[str]:
        """Names of the jobs that have a line."""
        if not self.results.is_file():
            return set()
        return {json.loads(line)["job"] for line in self.results.read_text(encoding="utf-8").splitlines()}

    def folder(self, job: Job) -> Path:
        """Where a job's checkpoints and logs lie."""
        return self.out / job.run.part / f"{job.run.name}.{job.seed}"

    def do_in_turn(self, jobs: Sequence[Job]) -> None:
        """Jobs of which each needs the one before."""
        for job in jobs:
            self.do(job)

    def do(self, job: Job) -> None:
        """Train and test one job, and write its line."""
        part, folder = PARTS[job.run.part], self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        targets = job.run.share * part.epochs * corpora.targets(self._data(part.corpus))
        updates = max(1, int(targets) // part.tokens)
        command = self.training(job, min(updates, self.most_updates or updates))
        log = folder / "train.log"
        if not log.is_file() or "done training" not in log.read_text(encoding="utf-8"):
            print(f"{job.name}: training", flush=True)
            self._run(command, folder, log)
        best = folder / "checkpoint_best.pt"
        tests = {column: self._test(job, lengths, best) for column, lengths in job.run.columns.items()}
        points = curves.read(log, "valid")
        earlier = curves.read(self._earlier(job) / "train.log", "train")[-1].hours if job.run.after else 0.0
        record = {
            "job": job.name,
            "title": job.run.title,
            "command": shlex.join(self._relative(word) for word in command),
            "torch": torch.__version__,
            "machine": self._machine(),
            "parameters": self._parameters(best),
            "kept_bytes_per_target": self._kept(best) if part.memory else None,
            "updates": [int(point.updates) for point in points],
            "hours": [round(earlier + point.hours, 4) for point in points],
            "valid_bits": [point.values["loss"] for point in points],
            "tests": tests,
        }
        with self.lock, self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{job.name}: {', '.join(f'{column} {value}' for column, value in tests.items()) or 'done'}", flush=True)

    def _data(self, corpus: str) -> Path:
        return self.out / "data" / corpus / "bin"

    def _earlier(self, job: Job) -> Path:
        (run,) = [run for run in RUNS if run.part == job.run.part and run.name == job.run.after]
        return self.folder(Job(run, job.seed))

    def training(self, job: Job, updates: int) -> list[str]:
        """The command that trains a job for so many updates."""
        part = PARTS[job.run.part]
        command = f"{part.train} {job.run.flags}"
        if job.run.after:
            command += f" checkpoint.finetune_from_model={self._earlier(job)}/checkpoint_last.pt"
        values = {
            **part.values,
            "updates": updates,
            "interval": max(1, updates // part.validations),
            "warmup": max(1, updates // 20),
            "long_warmup": max(1, updates // 3),
            "preset": job.run.preset,
            "seed": job.seed,
            "save": self.folder(job),
            "data": self._data(part.corpus),
        }
        return self._command(command, values)

    def _command(self, template: str, values: Mapping[str, object], lengths: str = "") -> list[str]:
        """A command of runs.json; {cpu} and {lengths} are any number of words, everything else is part of one."""
        on_cpu = self.device == "cpu"
        template = template.replace("{cpu}", "--cpu" if on_cpu else "").replace("{lengths}", lengths)
        values = {**values, "hydra_cpu": str(on_cpu).lower(), "examples": EXAMPLES}
        return [word.format(**values) for word in shlex.split(template)]

    def _test(self, job: Job, lengths: str, checkpoint: Path) -> float:
        part = PARTS[job.run.part]
        values = {**part.values, "checkpoint": checkpoint, "data": self._data(part.corpus)}
        command = self._command(part.test, values, lengths)
        log = self.folder(job) / f"test.{lengths.replace(' ', '_')}.log"
        log.unlink(missing_ok=True)
        self._run(command, self.folder(job), log)
        found = re.findall(part.result, log.read_text(encoding="utf-8"))
        if not found:
            raise SystemExit(f"claims: {log} has no result")
        return float(found[-1])

    def _kept(self, checkpoint: Path) -> float:
        """Bytes that a training step of two rows keeps for its backward pass, a target."""
        report = checkpoint.with_name("memory.json")
        command = [sys.executable, "-m", "fairseq_ms", "memory", "--path", str(checkpoint), "--batch-size", "2"]
        self._run([*command, "--cpu", "--json", str(report)], checkpoint.parent, checkpoint.with_name("memory.log"))
        return float(json.loads(report.read_text(encoding="utf-8"))["measured_per_target"])

    def _parameters(self, checkpoint: Path) -> int:
        weights = torch.load(checkpoint, map_location="cpu", weights_only=True)["model"]
        # Tied weights are two names for one tensor.
        return sum({weight.data_ptr(): weight.numel() for weight in weights.values()}.values())

    def _machine(self) -> str:
        return torch.cuda.get_device_name() if self.device == "cuda" else platform.processor() or platform.machine()

    def _relative(self, word: str) -> str:
        for path, name in ((self.out, "OUT"), (EXAMPLES, "user_dir_examples")):
            word = word.replace(str(path), name)
        return word

    def _run(self, command: Sequence[str], folder: Path, log: Path) -> None:
        """Run a command in a folder, its output after what the log has; SystemExit when it fails."""
        with log.open("a", encoding="utf-8") as file:
            done = subprocess.run(
                command,
                cwd=folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"claims: {Path(command[0]).name} ended with exit code {done.returncode}, see {log}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, metavar="TEXT", help="folder with train/*.txt, valid/*.txt and test/*.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder for data, checkpoints and results")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where (default: cpu)")
    parser.add_argument("--only", nargs="+", metavar="PART[/RUN[/SEED]]", help="these runs (default: all)")
    parser.add_argument("--max-updates", type=int, metavar="N", help="stop every run there; to try the driver")
    parser.add_argument("--list", action="store_true", help="print the runs and start none")
    args = parser.parse_args()
    jobs = [Job(run, seed) for run in RUNS for seed in run.seeds]
    for text in args.only or []:
        if not any(job.matches(text) for job in jobs):
            parser.error(f"--only must name runs that --list prints: got {text}")
    if args.only:
        jobs = [job for job in jobs if any(job.matches(text) for text in args.only)]
    driver = Driver(args.text.resolve(), args.out.resolve(), args.max_updates, args.device)
    done = driver.done()
    if args.list:
        print("\n".join(f"{job.name}  {'done' if job.name in done else f'{job.run.hours:.1f} h'}" for job in jobs))
        for part in PARTS:
            left = sum(job.run.hours for job in jobs if job.run.part == part and job.name not in done)
            print(f"{part}: {left:.1f} h left")
        return
    jobs = [job for job in jobs if job.name not in done]
    for corpus in sorted({PARTS[job.run.part].corpus for job in jobs}):
        corpora.prepare(corpus, driver.text, driver.out)
    # A later phase needs the earlier one's checkpoint.
    later = {job: [other for other in jobs if other.follows(job)] for job in jobs}
    chains = [[job, *later[job]] for job in jobs if not any(job in others for others in later.values())]
    with ThreadPoolExecutor(args.jobs) as pool:
        for future in [pool.submit(driver.do_in_turn, chain) for chain in chains]:
            future.result()


if __name__ == "__main__":
    main()
