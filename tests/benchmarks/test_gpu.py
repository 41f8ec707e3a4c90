"""The plan for a GPU's minutes: parts in order, none longer than its budget, and all of it in miniature on a CPU."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Part, main, parts, run
from benchmarks.table import Options
from benchmarks.tables import tables
from tests.helpers.cli import ROOT


def test_parts_take_turns_with_budgets_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GRACE", 1.0)
    deaf = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    plan = [
        Part("short", ["-c", "import sys; print('short'); sys.exit(3)"], 20),
        Part("long", ["-c", "import time; print('long', flush=True); time.sleep(60)"], 3),
        Part("deaf", ["-c", deaf], 3),
        Part("path", ["-c", "import json; print(json.__file__)"], 20, tmp_path / "packages"),
        Part("rest", ["-c", "import time; time.sleep(60)"], None),
        Part("never", ["-c", "print('never')"], None),
    ]
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "json.py").write_text("")
    ended = run(plan, tmp_path, 0.4)
    assert {name: how for name, (how, _) in ended.items()} == {
        "short": "exit code 3",
        "long": "ended when its time was over",
        "deaf": "killed: its time was over",
        "path": "exit code 0",
        "rest": "ended when its time was over",
        "never": "no time was left",
    }
    assert ended["long"][1] < 20
    log = (tmp_path / "log.txt").read_text()
    assert "never\n" not in log
    assert log.index("short\n") < log.index("long\n") < log.index("deaf\n") < log.index("packages/json.py\n")


@pytest.mark.parametrize(("device", "size"), [("cuda", "whole"), ("cpu", "whole"), ("cpu", "quick")])
def test_what_the_plan_names_is_there(device: str, size: str, tmp_path: Path) -> None:
    found = tables(Options(device=device, quick=size == "quick"))
    plan = parts(argparse.Namespace(device=device, size=size, out=tmp_path, transformers=None, transfo_xl=None))
    assert [part.name for part in plan][:6] == ["twins", "windows", "generation", "training", "compiled", "tests"]
    for part in plan:
        if "bench" in part.command:
            table = part.command[part.command.index("bench") + 1]
            chosen = found.values() if table == "all" else [found[table]]
            keys = [t.key(row) for t in chosen for row in t.rows]
            only = [part.command[place + 1] for place, word in enumerate(part.command) if word == "--only"]
            assert all(any(text in key for key in keys) for text in only), only
        else:
            names = [word.partition("::")[0] for word in part.command if word.startswith(str(ROOT))]
            assert names
            assert all(Path(name).is_file() for name in names)


@pytest.mark.slow
def test_the_plan_runs_in_miniature_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["--out", str(tmp_path / "out"), "--device", "cpu", "--size", "quick", "--minutes", "2"])
    said = capsys.readouterr().out
    assert "twins" in said
    head, *lines = map(json.loads, (tmp_path / "out" / "records.jsonl").read_text().splitlines())
    assert head["machine"]["quick"]
    measured = {line["key"] for line in lines if "numbers" in line}
    assert any(key.startswith("retina | windows | ") for key in measured)
    text = (tmp_path / "out" / "page.md").read_text()
    assert f"{head['machine']['device']}, torch {head['machine']['torch']}, 20" in " ".join(text.split())
    assert "Tables not measured" in text
