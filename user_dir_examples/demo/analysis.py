"""The papers' analyses on the two models that ``make demo`` trains, with their figures, in a few minutes.

Everything is written to ``demo/analysis``. The same commands work on any checkpoint: see ``fairseq-ms --help``.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ROOT = Path(__file__).resolve().parents[2]
MODELS = ("vanilla_lm", "retina_lm")

# A command by the name of its files; MODELS, RETINA, RUNS and DATA stand for the demo's checkpoints, one of them, their
# folder, and the corpus. All but NO_FIGURE draw one.
ANALYSES = {
    "nll_by_frequency": "nll-by-frequency MODELS DATA --limit 20000",
    "context_shuffle": "context-shuffle MODELS DATA --limit 100",
    "context_window": "context-window MODELS DATA --contexts 1,2,4,8,16,32,64,128,256 --limit 200",
    "neighbors": "neighbors RETINA DATA --tokens-per-sample 64 --limit 2000 --scales 4,16 --top 2 --remove-bpe",
    "sample_metrics": "sample-metrics MODELS DATA --prompts 8 --length 128 --timed 2 --remove-bpe",
    "memory": "memory --path RETINA DATA --batch-size 16",
    "memory_fit": "memory --arch multiscale_topdown_books_7_7_8_8 --fp16 --fit 20 "
    "--tokens-per-sample 512 --batch-size 64",
    "memory_sweep": "memory --arch vanilla_lm --sweep 128,256,512,1024",
    "tradeoff": "tradeoff RUNS DATA --limit 20000 --batch-size 16",
}
NO_FIGURE = ("neighbors", "sample_metrics", "memory_fit")


def arguments(name: str, demo: Path) -> list[str]:
    """The arguments of fairseq-ms, with paths in the places of capitals."""
    checkpoints = [str(demo / model / "checkpoint_best.pt") for model in MODELS]
    data = ["--data", str(demo / "data" / "bin")]
    meant = {"MODELS": checkpoints, "RETINA": checkpoints[1:], "RUNS": [str(demo)], "DATA": data}
    words = [part for word in ANALYSES[name].split() for part in meant.get(word, [word])]
    kinds = ("json",) if name in NO_FIGURE else ("json", "png")
    return words + [part for kind in kinds for part in (f"--{kind}", str(demo / "analysis" / f"{name}.{kind}"))]


def main() -> None:
    demo = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "demo").resolve()
    for model in MODELS:
        if not (demo / model / "checkpoint_best.pt").is_file():
            sys.exit(f"demo-analysis: {demo / model} holds no checkpoint_best.pt yet: run make demo first")
    (demo / "analysis").mkdir(exist_ok=True)
    for name in ANALYSES:
        words = arguments(name, demo)
        print(f"\n$ fairseq-ms {shlex.join(words)}\n", flush=True)
        done = subprocess.run([sys.executable, "-m", "fairseq_ms", *words], cwd=ROOT, check=False)
        if done.returncode:
            sys.exit(f"demo-analysis: fairseq-ms {words[0]} failed")
    print(f"\neverything is in {demo / 'analysis'}")


if __name__ == "__main__":
    main()
