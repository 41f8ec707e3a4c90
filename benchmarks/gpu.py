"""What a GPU is asked in the minutes that there are: parts by their value, each with a budget of its own.

    python -m benchmarks.gpu --out FOLDER --minutes 9          # or: make gpu OUT=FOLDER MINUTES=9

FOLDER has records.jsonl, a line for every row after each of its rounds, page.md, made of them, and log.txt, what every
part printed. A part that takes longer than its budget is ended with what it has; the last takes what is left. Records
of another machine are refused, since a FOLDER is of one card.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Tests of numerics that concern a device, and of what a GPU does otherwise than a CPU.
TWINS = ("core/ops/test_window_attention.py", "core/test_graphs.py")
FIRST = (
    *TWINS,
    "core/ops/test_attention.py",
    "core/ops/test_linear.py",
    "core/ops/test_linear_cross_entropy.py",
    "core/ops/test_recompute.py",
    "core/ops/test_dropout_masks.py",
)
TESTS = (
    *FIRST,
    *(f"models/test_{name}.py" for name in ("invariants", "multiscale", "streaming", "haed", "half_precision")),
    "core/test_retina.py",
    "core/test_cache.py",
    "lm/test_generation.py::test_beam_search_in_steps_of_fixed_shapes_finds_what_it_finds_without_caches",
    "host/test_launching.py::test_one_process_of_a_group_trains_and_resumes_as_one_alone",
)
# How long a part that was asked to end may take for its report.
GRACE = 20.0


class Part(NamedTuple):
    """A command after the Python that runs it, and the seconds that it may take; None for what is left.

    ``path`` is a folder of packages that come before the environment's.
    """

    name: str
    command: Sequence[str]
    seconds: float | None
    path: Path | None = None


def parts(args: argparse.Namespace) -> list[Part]:
    """The plan, the most valuable first."""
    on_gpu, quick = args.device == "cuda", args.size == "quick"
    half, vanilla = "bf16" if on_gpu else "float32", "vanilla 2" if quick else "vanilla 14"
    through, batches = ("core, graphs=True", ("1", "64")) if on_gpu else ("core", ("2",) if quick else ("1", "8"))
    flags = ["--device", args.device, "--rounds", "3", "--records", args.out / "records.jsonl"]
    flags += ["--report", args.out / "page.md", *(["--quick"] if quick else [])]

    def rows(table: str, *only: str) -> list[str]:
        wanted = [word for text in only for word in ("--only", text)]
        return [str(word) for word in ("-m", "fairseq_ms", "bench", table, *flags, *wanted)]

    def tests(names: Sequence[str], *more: str) -> list[str]:
        cache = ("-p", "no:cacheprovider", "-m", "not slow", *(str(ROOT / "tests" / name) for name in names))
        return ["-m", "pytest", "-q", "--tb=line", "--device", args.device, *more, *cache]

    generated = [f"{name} | {through} | {rows} | {half}" for rows in batches for name in ("retina 12", vanilla)]
    trained = [f"training | {name} | linear_cross_entropy | {half}" for name in (vanilla, "retina 12")]
    return [
        Part("twins", tests(TWINS, "-k", "kernels or finite"), 20),
        Part("windows", [*rows("retina", "| windows | ", "| dense flash attention | "), "--alone"], 40),
        Part("generation", [*rows("generate", *generated), "--alone"], 70),
        Part("training", [*rows("training", *trained), "--alone"], 40),
        Part("compiled", rows("compiled"), 90),
        Part("tests", tests(FIRST, "-n", "4"), 120),
        Part("rest", rows("all"), None, args.transformers),
        Part("TransfoXL", rows("all", "TransfoXL"), None, args.transfo_xl),
        Part("all tests", tests(TESTS, "-n", "4"), None),
    ]


def run(plan: Sequence[Part], out: Path, minutes: float) -> dict[str, tuple[str, float]]:
    """Run the parts one after the other; by name, how each ended and the seconds that it took."""
    end, ended = time.monotonic() + 60.0 * minutes, dict[str, tuple[str, float]]()
    with (out / "log.txt").open("a", encoding="utf-8") as log:
        for part in plan:
            began = time.monotonic()
            left = end - began
            if left <= 0:
                ended[part.name] = "no time was left", 0.0
                continue
            print(f"\n# {part.name}: python {' '.join(part.command)}", file=log, flush=True)
            paths = [str(part.path)] * (part.path is not None) + [str(ROOT), os.environ.get("PYTHONPATH", "")]
            process = subprocess.Popen(
                [sys.executable, *part.command],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            how = _wait(process, min(left, part.seconds or left))
            ended[part.name] = how, time.monotonic() - began
            print(f"{part.name:<12} {ended[part.name][1]:6.1f} s  {how}", flush=True)
    return ended


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """How a part ended: by itself with a code, or asked to, or killed with all that it has started."""
    try:
        return f"exit code {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        # Measuring writes its report at that, and pytest its summary.
        process.send_signal(signal.SIGINT)
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    try:
        process.wait(GRACE)
        return "ended when its time was over"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "killed: its time was over"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plan; 0 where every part ended by itself with 0, or when its time was over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of records, page and log, of one machine")
    parser.add_argument("--minutes", type=float, default=60.0, help="of everything (default: 60)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where (default: cuda)")
    parser.add_argument("--size", choices=("whole", "quick"), default="whole", help="quick: in miniature")
    parser.add_argument("--transformers", type=Path, help="folder that has Hugging Face's transformers, if apart")
    parser.add_argument("--transfo-xl", type=Path, help="folder that has an older one, with TransfoXL")
    args = parser.parse_args(arguments)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    ended = run(parts(args), args.out, args.minutes)
    bad = [f"{name} ({how})" for name, (how, _) in ended.items() if how.startswith(("exit code", "killed"))]
    bad = [text for text in bad if "(exit code 0)" not in text]
    print(f"{args.out}: page.md, records.jsonl, log.txt" + (f"; failed: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
