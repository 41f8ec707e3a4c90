#!/usr/bin/env python3
"""How far back small models recall a symbol, beside how far they see by formula: two figures and two tables.

    python user_dir_examples/recall/run.py --out runs/recall

Makes the exercises, trains every model of ``RUNS``, one after the other and on one thread (``OMP_NUM_THREADS`` chooses
another number), and asks all of them with ``fairseq-ms recall``. Flags that this script does not know go to
fairseq-train. The same command goes on with what was interrupted.
"""

import argparse
import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
SHARED = """
    --decoder-embed-dim 64 --decoder-ffn-embed-dim 128 --decoder-attention-heads 4 --share-decoder-input-output-embed
    --dropout 0.0 --attention-dropout 0.0 --criterion cross_entropy --optimizer adam --adam-betas (0.9,0.98) --lr 0.003
    --lr-scheduler cosine --warmup-updates 50 --clip-norm 1.0 --seed 1 --cpu --num-workers 0 --disable-validation
    --save-interval-updates 200 --keep-interval-updates 1 --no-epoch-checkpoints --log-format json --log-interval 50
"""
# A group's exercises, the flags of all its models, and each model's own. Streams: a window of 8 states, four layers.
RUNS = {
    "streams": (
        "--longest 64",
        "--task streaming_language_modeling --tokens-per-sample 4 --batch-size 128 --max-update 1000 "
        "--decoder-normalize-before --init-std 0.06",
        {
            "transformer_xl": "--decoder-layers 4 --mem-len 4",
            "compressive_transformer": "--decoder-layers 4 --mem-len 2 --compressed-mem-len 2 --compression-rate 2",
            "transformer_ql": "--scale-layers 1x=1,2x=1,4x=1 --output-layers 1 --mem-len 4",
        },
    ),
    "blocks": (
        "--longest 32 --ask announced",
        "--task language_modeling --tokens-per-sample 64 --batch-size 16 --max-update 1000 "
        "--init-std 0.1 --embedding-init-std 0.7",
        {
            "vanilla_lm_window4": "--decoder-layers 2 --scale-windows 1x=0:4",
            "retina_lm": "--decoder-layers 2 --scale-windows 1x=0:4,4x=4:12",
            "multiscale_topdown": "--scale-layers 8x=1,4x=1,1x=2",
            "multiscale_bottomup": "--scale-layers 8x=1,4x=1,1x=2",
            "vanilla_lm": "--decoder-layers 3",
        },
    ),
}


def run(command: list[str], log: Path | None = None) -> None:
    """Run a command, its output in ``log``; SystemExit with one sentence when it fails."""
    with log.open("a", encoding="utf-8") if log else nullcontext() as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out and subprocess.STDOUT, check=False)
    if done.returncode:
        where = f", its output is in {log}" if log else ""
        raise SystemExit(f"recall: {shlex.join(command[:4])} ended with exit code {done.returncode}{where}")


def training(group: str, name: str, data: Path, folder: Path) -> list[str]:
    """The command that trains a model."""
    _, common, models = RUNS[group]
    arch = name.removesuffix("_window4")
    own = shlex.split(f"--arch {arch} {common} {models[name]}")
    sources = [str(data), "--user-dir", str(ROOT / "fairseq_ms"), "--save-dir", str(folder)]
    return ["fairseq-train", *sources, *SHARED.split(), *own]


def exercises(group: str, folder: Path) -> Path:
    """The group's data folder, made unless it is there."""
    bin = folder / "data" / "bin"
    if not (bin / "recall.json").is_file():
        command = [sys.executable, str(ROOT / "preprocess" / "recall" / "prepare.py"), "--out", str(folder / "data")]
        run([*command, "--workers", "1", "--quiet", *RUNS[group][0].split()])
    return bin


def train(group: str, data: Path, folder: Path, more: list[str]) -> list[str]:
    """Train the group's models, or go on with them, unless they are done; the checkpoints with their labels."""
    found = []
    for name in RUNS[group][2]:
        log = folder / f"{name}.log"
        if not log.is_file() or "done training" not in log.read_text(encoding="utf-8"):
            print(f"training {name}", flush=True)
            program, *flags = training(group, name, data, folder / name)
            run([sys.executable, str(Path(sys.executable).parent / program), *flags, *more], log)
        found.append(f"{name}={folder / name / 'checkpoint_last.pt'}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for exercises, checkpoints, figures and tables")
    parser.add_argument("--group", choices=list(RUNS), help="one of the two (default: both)")
    args, more = parser.parse_known_args()
    for group in [args.group] if args.group else RUNS:
        folder = args.out.resolve() / group
        folder.mkdir(parents=True, exist_ok=True)
        data = exercises(group, folder)
        models = train(group, data, folder, more)
        files = ["--json", str(folder / "recall.json"), "--png", str(folder / "recall.png")]
        print(f"\n{group}", flush=True)
        run([sys.executable, "-m", "fairseq_ms", "recall", *models, "--data", str(data), *files])


if __name__ == "__main__":
    main()
