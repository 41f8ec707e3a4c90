"""Running the real commands, as a user does, in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USER_DIR = ROOT / "fairseq_ms"


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The current environment with this source tree first on the path, and `env` before that."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    paths = [(env or {}).get("PYTHONPATH", ""), str(ROOT), str(ROOT / "preprocess"), os.environ.get("PYTHONPATH", "")]
    return {**found, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run_cli(
    *command: str | Path,
    check: bool = True,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run one command and return what it printed (text in .stdout and .stderr) and its .returncode.

    `fairseq-train` and its like are taken from the environment that runs the tests, `fairseq-ms` is
    `python -m fairseq_ms` of this source tree, `python` is this interpreter. `env` is added to the current
    environment; a PYTHONPATH in it comes first on the path. With `check`, a non-zero exit code fails the test
    and shows the command's output.
    """
    name, *arguments = (str(part) for part in command)
    if name == "fairseq-ms":
        program = [sys.executable, "-m", "fairseq_ms"]
    elif name == "python":
        program = [sys.executable]
    else:
        program = [sys.executable, str(Path(sys.executable).parent / name)]
    done = subprocess.run(
        [*program, *arguments],
        cwd=cwd,
        env=environment(env),
        input=input,
        stdin=subprocess.DEVNULL if input is None else None,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check and done.returncode != 0:
        raise AssertionError(
            f"{' '.join([name, *arguments])}\nended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done
