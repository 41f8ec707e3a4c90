"""The papers' analyses on the two models that ``make demo`` trains, with their figures, in a few minutes.

Everything is written to ``demo/analysis``. The same commands work on any checkpoint: see ``fairseq-ms --help``.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("vanilla_lm", "retina_lm")

# (what it is, the command, what its files are called, whether there is a figure). MODELS, RETINA and DATA stand for
# the demo's checkpoints, one of them, and its corpus.
ANALYSES = [
    (
        "Figures 5 and 6: which tokens the models are good at",
        "nll-by-frequency MODELS DATA --limit 20000",
        "nll_by_frequency",
        True,
    ),
    (
        "Figure 4: how far back the order of words matters",
        "context-shuffle MODELS DATA --limit 100",
        "context_shuffle",
        True,
    ),
    (
        "Table 4, last block: what each further token of context is worth",
        "context-window MODELS DATA --contexts 1,2,4,8,16,32,64,128,256 --limit 200",
        "context_window",
        True,
    ),
    (
        "Table 6: nearest neighbours at every scale",
        "neighbors RETINA DATA --tokens-per-sample 64 --limit 2000 --scales 4,16 --top 2 --remove-bpe",
        "neighbors",
        False,
    ),
    (
        "Table 5: what samples are like",
        "sample-metrics MODELS DATA --prompts 8 --length 128 --timed 2 --remove-bpe",
        "sample_metrics",
        False,
    ),
    ("Table 8: where the memory of a training step goes", "memory --path RETINA DATA --batch-size 16", "memory", True),
    ("Table 8, as the paper counts", "memory --paper", "memory_paper", True),
    (
        "Which layers at which scales fit into 20 GiB, at the paper's sizes",
        "memory --arch multiscale_topdown_books_7_7_8_8 --tokens-per-sample 512 --batch-size 64 --fp16 --fit 20",
        "memory_fit",
        False,
    ),
    (
        "Figure 2: one layer at several scales",
        "memory --arch vanilla_lm --sweep 128,256,512,1024",
        "memory_sweep",
        True,
    ),
    ("Figure 3: perplexity against memory", "tradeoff RUNS DATA --limit 20000 --batch-size 16", "tradeoff", True),
]


def arguments(command: str, name: str, figure: bool, demo: Path, out: Path) -> list[str]:
    """The arguments of fairseq-ms, with paths in the places of capitals."""
    checkpoints = [str(demo / model / "checkpoint_best.pt") for model in MODELS]
    meant = {
        "MODELS": checkpoints,
        "RETINA": checkpoints[1:],
        "RUNS": [str(demo)],
        "DATA": ["--data", str(demo / "data" / "bin")],
    }
    words = [part for word in command.split() for part in meant.get(word, [word])]
    files = {"--json": out / f"{name}.json"} | ({"--png": out / f"{name}.png"} if figure else {})
    return words + [part for flag, path in files.items() for part in (flag, str(path))]


def main() -> None:
    demo = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "demo").resolve()
    missing = [model for model in MODELS if not (demo / model / "checkpoint_best.pt").is_file()]
    if missing:
        sys.exit(f"demo-analysis: {demo / missing[0]} holds no checkpoint_best.pt yet: run make demo first")
    out = demo / "analysis"
    out.mkdir(exist_ok=True)
    began = time.monotonic()
    for title, command, name, figure in ANALYSES:
        words = arguments(command, name, figure, demo, out)
        print(f"\n== {title}\n$ fairseq-ms {shlex.join(words)}\n", flush=True)
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        done = subprocess.run([sys.executable, "-m", "fairseq_ms", *words], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            sys.exit(f"demo-analysis: fairseq-ms {words[0]} failed")
    figures = ", ".join(sorted(path.name for path in out.glob("*.png")))
    print(f"\ndone in {time.monotonic() - began:.0f} s; everything is in {out}: {figures}")


if __name__ == "__main__":
    main()
