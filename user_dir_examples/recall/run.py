#!/usr/bin/env python3
"""How far back small models recall a symbol, beside how far they see by formula: a figure and a table a group.

    python user_dir_examples/recall/run.py --out runs/recall --group blocks

Makes the exercises, trains every model of ``GROUPS``, one after the other and on one thread (``OMP_NUM_THREADS``
chooses another number), and asks all of a group with ``fairseq-ms recall``. Flags that this script does not know go to
fairseq-train. The same command goes on with what was interrupted.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
SHARED = """
    --decoder-embed-dim 64 --decoder-ffn-embed-dim 128 --decoder-attention-heads 4 --share-decoder-input-output-embed
    --dropout 0.0 --attention-dropout 0.0 --criterion cross_entropy --lr-scheduler cosine --warmup-updates 50
    --clip-norm 1.0 --seed 1 --cpu --num-workers 0 --disable-validation --save-interval-updates 200
    --keep-interval-updates 1 --no-epoch-checkpoints --log-format json --log-interval 50
"""
ADAM = "--optimizer adam --adam-betas (0.9,0.98) --lr 0.003"
MUON = "--optimizer muon --lr 0.01 --adam-lr 0.003"
# Of "far", 4,096 tokens an update: rows of twice the greatest distance, or segments of 64.
ROWS = (
    "--task language_modeling --tokens-per-sample {row} --batch-size {rows} --positions rotary --init-std 0.1 "
    "--embedding-init-std 0.7"
)
SEGMENTS = "--task streaming_language_modeling --tokens-per-sample 64 --batch-size 64 --decoder-normalize-before"
RETINA = "--arch retina_lm --decoder-layers 3 --scale-windows 1x=0:64,16x=64:4096 --scale-heads 1x=2,16x=2"


class Group(NamedTuple):
    """Models that do the same exercises.

    Attributes:
        exercises: flags of ``fairseq-ms prepare recall``
        stages: greatest distance and updates of every training; each goes on from the weights of the one before
        flags: of all trainings
        models: each one's own flags
    """

    exercises: str
    stages: Sequence[tuple[int, int]]
    flags: str
    models: Mapping[str, str]


GROUPS = {
    # A window of 8 states, four layers.
    "streams": Group(
        "",
        [(64, 1000)],
        f"{ADAM} --task streaming_language_modeling --tokens-per-sample 4 --batch-size 128 --decoder-normalize-before "
        "--init-std 0.06",
        {
            "transformer_xl": "--arch transformer_xl --decoder-layers 4 --mem-len 4",
            "compressive_transformer": "--arch compressive_transformer --decoder-layers 4 --mem-len 2 "
            "--compressed-mem-len 2 --compression-rate 2",
            "transformer_ql": "--arch transformer_ql --scale-layers 1x=1,2x=1,4x=1 --output-layers 1 --mem-len 4",
        },
    ),
    "blocks": Group(
        "--ask announced",
        [(32, 1000)],
        f"{ADAM} --task language_modeling --tokens-per-sample 64 --batch-size 16 --init-std 0.1 "
        "--embedding-init-std 0.7",
        {
            "vanilla_lm_window4": "--arch vanilla_lm --decoder-layers 2 --scale-windows 1x=0:4",
            "retina_lm": "--arch retina_lm --decoder-layers 2 --scale-windows 1x=0:4,4x=4:12",
            "multiscale_topdown": "--arch multiscale_topdown --scale-layers 8x=1,4x=1,1x=2",
            "multiscale_bottomup": "--arch multiscale_bottomup --scale-layers 8x=1,4x=1,1x=2",
            "vanilla_lm": "--arch vanilla_lm --decoder-layers 3",
        },
    ),
    "far": Group(
        "--tokens 4000000 --test-tokens 400000",
        [(64, 400), (256, 300), (2048, 400)],
        MUON,
        {
            "transformer_ql": f"{SEGMENTS} --arch transformer_ql --scale-layers 1x=1,4x=1,16x=1 --output-layers 1 "
            "--mem-len 64",
            "transformer_xl": f"{SEGMENTS} --arch transformer_xl --decoder-layers 4 --mem-len 64",
            "vanilla_lm_window64": f"{ROWS} --arch vanilla_lm --decoder-layers 3 --scale-windows 1x=0:64",
            "retina_lm": f"{ROWS} {RETINA}",
            "retina_lm_max": f"{ROWS} {RETINA} --downsampler max",
            "multiscale_topdown": f"{ROWS} --arch multiscale_topdown --scale-layers 64x=1,16x=1,1x=2",
            "vanilla_lm": f"{ROWS} --arch vanilla_lm --decoder-layers 3",
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


def training(group: Group, name: str, stage: int, folder: Path) -> list[str]:
    """The command of a stage of a model's training."""
    longest, updates = group.stages[stage]
    own = f"{group.flags} {group.models[name].format(row=2 * longest, rows=2048 // longest)} --max-update {updates}"
    before = ["--finetune-from-model", str(checkpoint(folder, name, stage - 1))] if stage else []
    places = [str(folder / f"data{longest}" / "bin"), "--user-dir", str(ROOT / "fairseq_ms"), *before]
    save = str(checkpoint(folder, name, stage).parent)
    return ["fairseq-train", *places, "--save-dir", save, *SHARED.split(), *shlex.split(own)]


def checkpoint(folder: Path, name: str, stage: int) -> Path:
    """Where a stage leaves its weights."""
    return folder / f"{name}.{stage + 1}" / "checkpoint_last.pt"


def prepare(group: Group, folder: Path) -> None:
    """Make the exercises of every stage, in one vocabulary, unless they are there."""
    first, *_ = data = [folder / f"data{longest}" for longest, _ in group.stages]
    for (longest, _), out in zip(group.stages, data):
        if not (out / "bin" / "recall.json").is_file():
            command = [sys.executable, str(ROOT / "preprocess" / "recall" / "prepare.py"), "--out", str(out)]
            vocabulary = [] if out is first else ["--vocab-from", str(first)]
            own = [*group.exercises.split(), "--longest", str(longest), *vocabulary]
            run([*command, "--workers", "1", "--quiet", *own])


def train(group: Group, folder: Path, more: list[str]) -> list[str]:
    """Train the group's models, or go on with them, unless they are done; the checkpoints with their labels."""
    found = []
    for name in group.models:
        for stage in range(len(group.stages)):
            log = folder / f"{name}.{stage + 1}.log"
            if not log.is_file() or "done training" not in log.read_text(encoding="utf-8"):
                print(f"training {name}, {stage + 1} of {len(group.stages)}", flush=True)
                program, *flags = training(group, name, stage, folder)
                run([sys.executable, str(Path(sys.executable).parent / program), *flags, *more], log)
        found.append(f"{name}={checkpoint(folder, name, stage)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for exercises, checkpoints, figures and tables")
    parser.add_argument("--group", choices=list(GROUPS), help="one of them (default: all)")
    args, more = parser.parse_known_args()
    for name in [args.group] if args.group else GROUPS:
        group, folder = GROUPS[name], args.out.resolve() / name
        folder.mkdir(parents=True, exist_ok=True)
        prepare(group, folder)
        models = train(group, folder, more)
        files = ["--json", str(folder / "recall.json"), "--png", str(folder / "recall.png")]
        print(f"\n{name}", flush=True)
        data = str(folder / f"data{group.stages[-1][0]}" / "bin")
        run([sys.executable, "-m", "fairseq_ms", "recall", *models, "--data", data, *files])


if __name__ == "__main__":
    main()
