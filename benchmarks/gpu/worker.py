"""The process that measures rows. Its parent starts another where this one dies, and the rows left go on there."""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.gpu.device import DEVICES, Device
from benchmarks.gpu.records import Records
from benchmarks.gpu.rows import FAILED, run_row
from benchmarks.gpu.tables import tables

# The exit code of a process whose device answers no more.
START_AGAIN = 75


def facts(device: Device, quick: bool) -> dict[str, object]:
    """What the numbers depend on."""
    return {
        "device": device.name,
        "memory_gb": round(device.memory / 1e9),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "quick": quick,
    }


def work(keys: Sequence[str], records: Records, device: Device, quick: bool) -> int:
    """Measure these rows one after the other; 0, or ``START_AGAIN`` when the device answers no more."""
    rows = {table.key(row): row for table in tables(quick) for row in table.rows}
    with tqdm(keys, unit="row", desc="rows") as bar:
        for key in bar:
            bar.set_postfix_str(key)
            record = run_row(key, rows[key], device)
            records.append(record)
            if FAILED in record and not _answers(device):
                return START_AGAIN
    return 0


def _answers(device: Device) -> bool:
    """After some errors a GPU answers no more in the process that met them."""
    try:
        torch.ones(1, device=device.torch).add_(1.0)
        device.wait()
    except Exception:
        return False
    return True


def main() -> int:
    """Rows' keys come on standard input."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.worker")
    parser.add_argument("records", type=Path)
    parser.add_argument("--device", choices=list(DEVICES), required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    # Models are built by the hundred, and fairseq logs every one of them.
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    device = DEVICES[args.device]()
    records = Records(args.records, facts(device, args.quick))
    try:
        return work(json.load(sys.stdin), records, device, args.quick)
    except KeyboardInterrupt:
        # The parent was interrupted as well, and says so.
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
