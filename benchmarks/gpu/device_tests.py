"""The tests that show on the device what the tables then measure: invariants, and parity with naive twins."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.device import Device
from benchmarks.gpu.rows import Cell, Row, Table

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "tests/models/test_invariants.py",
    "tests/models/test_multiscale.py",
    "tests/models/test_streaming.py",
    "tests/models/test_haed.py",
    "tests/models/test_iem.py::test_loss_and_gradients_equal_a_double_loop_with_duplicates",
    "tests/models/test_half_precision.py",
    "tests/modules/test_retina.py",
    "tests/modules/test_pooling.py",
    "tests/modules/test_kv_cache.py",
    "tests/ops/test_attention.py",
    "tests/ops/test_linear.py",
    "tests/ops/test_linear_cross_entropy.py",
    "tests/ops/test_recompute.py",
    "tests/ops/test_dropout_masks.py",
)
# Processes that share the device; the work of these tests is mostly Python's.
JOBS = 4


def tables(quick: bool) -> list[Table]:
    """A row a file; ``quick`` takes the shortest of them."""
    files = ("tests/modules/test_pooling.py",) if quick else FILES
    jobs = 0 if quick else JOBS
    return [
        Table(
            "tests",
            "Tests on the device",
            "`pytest --device cuda` makes every tensor of a test on the GPU, and leaves out those of paths that only a "
            "CPU takes. A file with failures says which.",
            ["file"],
            {"passed": "passed"},
            [Row((file,), partial(run_tests, file=file, jobs=jobs)) for file in files],
        )
    ]


def run_tests(device: Device, file: str, jobs: int) -> Mapping[str, Cell]:
    """How many tests of a file pass; AssertionError with the names of those that do not."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        flags = ["--device", device.torch.type, "-q", "-n", str(jobs), f"--junitxml={results}"]
        program = [sys.executable, "-m", "pytest", file, *flags, "-p", "no:cacheprovider"]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
        cases = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []
    failed = [str(case.get("name")) for case in cases if _has(case, "failure") or _has(case, "error")]
    if failed:
        raise AssertionError(f"{len(failed)} of {len(cases)} fail: {', '.join(failed)}")
    if done.returncode != 0:
        raise AssertionError(f"pytest ended with {done.returncode}: {(done.stderr or done.stdout)[-200:]}")
    return {"passed": len(cases)}


def _has(case: ElementTree.Element, what: str) -> bool:
    return case.find(what) is not None
