"""How many threads train the demo's retina_lm fastest, alone and beside another program that computes.

    python user_dir_examples/demo/threads.py [--rounds 5] [--seconds 3]

Every setting has a process of its own, and they take turns, so that what else the machine does falls on all of them.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

CORES = os.cpu_count() or 1
SETTINGS = {
    f"{threads} threads, {policy}": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": policy}
    for threads in (1, 2, 4)
    for policy in ("active", "passive")
    if threads <= CORES and (threads > 1 or policy == "active")
}


def work() -> None:
    """Train on made-up text for as many seconds as a line of input says; print updates a second and CPU s an update."""
    import torch

    import fairseq_ms
    from fairseq_ms.analysis import untrained
    from models import CONTEXT, MODELS, as_arguments

    fairseq_ms.register()
    torch.manual_seed(1)
    model, _ = untrained.build(as_arguments(MODELS["retina_lm"]), vocabulary=4000)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    text_BT = torch.randint(4, 4000, (4, CONTEXT + 1))
    print("ready", flush=True)
    for line in sys.stdin:
        began, cpu, updates = time.monotonic(), time.process_time(), 0
        while time.monotonic() - began < float(line):
            logits_BTV = model(text_BT[:, :-1])[0]
            torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), text_BT[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
        print(updates / (time.monotonic() - began), (time.process_time() - cpu) / updates, flush=True)


def answer(worker: subprocess.Popen[str]) -> str:
    """The worker's next line."""
    assert worker.stdout is not None
    return worker.stdout.readline()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each setting is measured (default: 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a measurement (default: 3)")
    args = parser.parse_args()
    folder = Path(__file__).resolve().parent
    workers = {}
    for name, variables in SETTINGS.items():
        workers[name] = subprocess.Popen(
            [sys.executable, "-c", "import threads; threads.work()"],
            env={**os.environ, **variables, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert answer(workers[name]) == "ready\n"
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for _ in range(args.rounds):
        for beside in ("alone", "beside another"):
            for name, worker in workers.items():
                other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if beside != "alone" else None
                print(args.seconds, file=worker.stdin)
                found.setdefault((name, beside), []).append(tuple(map(float, answer(worker).split())))
                if other is not None:
                    other.kill()
                    other.wait()
    for worker in workers.values():
        worker.communicate()
    print(f"{CORES} cores, load {os.getloadavg()[0]:.1f}; medians (least to most) of {args.rounds} rounds")
    for (name, beside), numbers in found.items():
        speeds, costs = zip(*numbers)
        spread = f"({min(speeds):.2f} to {max(speeds):.2f})"
        median, cost = statistics.median(speeds), statistics.median(costs)
        print(f"{name:18}  {beside:14}  {median:5.2f} updates/s {spread}, {cost:.3f} CPU s an update")


if __name__ == "__main__":
    main()
