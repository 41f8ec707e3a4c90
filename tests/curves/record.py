"""Write ``curves.json`` anew, or only the runs that are named: ``python -m tests.curves.record [RUN ...]``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from tests.curves.runs import KEPT, RUNS, corpus, train


def main() -> None:
    """Train, replace the file at once, and say what else a change of curves takes."""
    named = sys.argv[1:] or list(RUNS)
    if unknown := set(named) - set(RUNS):
        raise SystemExit(f"RUN must be one of {', '.join(RUNS)}: got {sorted(unknown)[0]!r}")
    kept = json.loads(KEPT.read_text()) if sys.argv[1:] else {}
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(Path(folder) / "corpus")
        for run in tqdm(named, unit="run"):
            kept |= {f"{run}: {name}": values for name, values in train(run, data).items()}
    # One curve a line in the order of the runs, so that a diff names what has changed.
    order = [f"{run}: {name}" for run in RUNS for name in ("loss", "gnorm")]
    lines = [f"  {json.dumps(name)}: {json.dumps(kept[name])}" for name in order if name in kept]
    written = KEPT.with_suffix(".tmp")
    written.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(written, KEPT)
    print(f"{KEPT}: written. If curves have changed, say in CHANGELOG.md, under Unreleased, which and why.")


if __name__ == "__main__":
    main()
