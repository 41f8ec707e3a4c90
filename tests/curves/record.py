"""Write ``curves.json`` anew: ``python -m tests.curves.record``, from the top of the source tree."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from tqdm import tqdm

from tests.curves.runs import KEPT, RUNS, corpus, train


def main() -> None:
    """Train everything, replace the file at once, and say what else a change of curves takes."""
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(Path(folder) / "corpus")
        curves = {run: train(run, data) for run in tqdm(RUNS, unit="run")}
    # One curve a line, so that a diff names what has changed.
    lines = [
        f"  {json.dumps(f'{run}: {name}')}: {json.dumps(values)}"
        for run, curve in curves.items()
        for name, values in curve.items()
    ]
    written = KEPT.with_suffix(".tmp")
    written.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(written, KEPT)
    print(f"{KEPT}: written. If curves have changed, say in CHANGELOG.md, under Unreleased, which and why.")


if __name__ == "__main__":
    main()
