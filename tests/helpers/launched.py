"""``torchrun`` as on several nodes of one process each, all of which are this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.cli import environment


class Nodes:
    """A ``fairseq-train`` on so many nodes, which find each other through torchrun's rendezvous.

    ``program`` may take the place of fairseq-train's file. A ``with`` statement leaves no process behind.
    """

    def __init__(self, command: Sequence[Any], place: Path, count: int = 2, program: Path | None = None) -> None:
        train = program or Path(sys.executable).parent / str(command[0])
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node", "1"]
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{_free_port()}", str(train)]
        launch += [str(part) for part in command[1:]]
        place.mkdir(exist_ok=True)
        self.logs = [place / f"node{node}.log" for node in range(count)]
        self.processes = []
        for log in self.logs:
            with open(log, "w") as file:
                started = subprocess.Popen(launch, env=environment(), stdout=file, stderr=file, start_new_session=True)
            self.processes.append(started)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            # A node's own process ends those that it has started.
            process.terminate()
        for process in self.processes:
            process.wait(60)

    def wait(self, seconds: float) -> list[int]:
        """The exit codes of all nodes; raises TimeoutExpired if one has not ended by then."""
        return [process.wait(seconds) for process in self.processes]

    def log_of(self, rank: int) -> Path:
        """The log of the node that this rank runs on: torchrun gives out ranks as nodes arrive."""
        (log,) = (log for log in self.logs if f"as rank {rank}\n" in log.read_text())
        return log

    def printed(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
