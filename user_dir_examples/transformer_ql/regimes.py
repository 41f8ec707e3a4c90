#!/usr/bin/env python3
"""Transformer-QL beside Transformer-XL early in training and where a model overfits, as two Markdown tables.

    python user_dir_examples/transformer_ql/regimes.py data/simplebooks2/bin runs/regimes

Early: width 128, 400 updates of 1,024 tokens, Transformer-QL without droppath; validation perplexity at the end.
Overfitting: width 96, 1,500 updates of 512 tokens over the first 30,000 tokens of the training data again and again,
Transformer-QL with droppath 0.3; best and last validation perplexity. Eight pre-LN layers, segment and memory of 8
tokens, dropout and clipping as in Appendix E for SimpleBooks-2, but input and output embeddings of their own. One run
after the other, each with as many threads as torch takes (set OMP_NUM_THREADS to choose); flags that this script does
not know go to fairseq-train. The same command goes on with runs that were interrupted.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from fairseq.data import data_utils, indexed_dataset

import fairseq_ms

MODELS = {"Transformer-XL": ["transformer_xl"], "Transformer-QL": ["transformer_ql", "--scale-layers", "1x=3,2x=3"]}
# Tokens of each split where a model overfits.
SHORTENED = {"train": 30_000, "valid": 10_000}


def width(dim: int) -> list[str]:
    """Flags of a model of this width."""
    sizes = {"embed-dim": dim, "ffn-embed-dim": 4 * dim, "attention-heads": dim // 32}
    return [text for name, size in sizes.items() for text in (f"--decoder-{name}", str(size))]


REGIMES = {
    "early": [*width(128), "--batch-size", "128", "--max-update", "400"],
    "overfitting": [*width(96), "--batch-size", "64", "--max-update", "1500"],
}
COMMON = shlex.split("""
    --task streaming_language_modeling --tokens-per-sample 8 --mem-len 8 --decoder-normalize-before
    --dropout 0.1 --attention-dropout 0.1 --activation-dropout 0.1 --criterion linear_cross_entropy --clip-norm 0.25
    --optimizer adam --lr 0.001 --lr-scheduler cosine --warmup-updates 50
    --num-workers 0 --no-epoch-checkpoints --log-format json
""")
DROPPATH = {"early": "0.0", "overfitting": "0.3"}


def shorten(data: Path, out: Path) -> None:
    """A data folder of the first lines of train and valid, about as many tokens as ``SHORTENED`` says."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(data / "dict.txt", out / "dict.txt")
    for split, wanted in SHORTENED.items():
        lines = data_utils.load_indexed_dataset(str(data / split))
        if lines is None:
            raise SystemExit(f"DATA must be a folder that fairseq-preprocess wrote: {data / split}.bin is missing")
        builder = indexed_dataset.make_builder(str(out / f"{split}.bin"), "mmap")
        tokens = 0
        for line in range(len(lines)):
            if tokens >= wanted:
                break
            builder.add_item(torch.as_tensor(lines[line]))
            tokens += len(lines[line])
        # The index comes last, and is what says that the split is whole.
        builder.finalize(str(out / f"{split}.idx"))


def perplexities(log: Path) -> list[float]:
    """Every validation perplexity that a training has printed, in the order of updates."""
    found: dict[int, float] = {}
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    for record in re.findall(r"\| valid \| (\{.*\})", text):
        values = json.loads(record)
        found[int(values["valid_num_updates"])] = float(values["valid_ppl"])
    return [found[update] for update in sorted(found)]


def train(data: Path, folder: Path, flags: list[str]) -> list[float]:
    """Train, or go on with it, unless it is done; the validation perplexities."""
    log = folder.with_name(f"{folder.name}.log")
    if not log.is_file() or "done training" not in log.read_text(encoding="utf-8"):
        log.parent.mkdir(parents=True, exist_ok=True)
        command = ["fairseq-train", str(data), "--user-dir", str(Path(fairseq_ms.__file__).parent), *COMMON, *flags]
        with log.open("a", encoding="utf-8") as out:
            done = subprocess.run(
                [*command, "--save-dir", str(folder)], stdout=out, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode:
            raise SystemExit(f"training ended with exit code {done.returncode}, see {log}")
    return perplexities(log)


def rows(regime: str, data: Path, out: Path, seeds: list[int], more: list[str]) -> Iterator[str]:
    """The rows of a table, each when its training is done."""
    for seed, (title, model) in product(seeds, MODELS.items()):
        flags = ["--arch", *model, *REGIMES[regime], "--seed", str(seed)]
        if title == "Transformer-QL":
            flags += ["--droppath", DROPPATH[regime]]
        found = train(data, out / f"{regime}.{model[0]}.{seed}", [*flags, *more])
        best = f"{min(found):.1f} | " if regime == "overfitting" else ""
        yield f"| {title} | {seed} | {best}{found[-1]:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA", help="folder that fairseq-preprocess wrote")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for logs and checkpoints")
    parser.add_argument("--regime", choices=list(REGIMES), help="one of the two (default: both)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="a run of each (default: 1 2)")
    args, more = parser.parse_known_args()
    for regime in [args.regime] if args.regime else REGIMES:
        data = args.data
        if regime == "overfitting":
            data = args.out / "data"
            if not (data / "valid.idx").is_file():
                shorten(args.data, data)
        best = ("best valid | ", "--- | ") if regime == "overfitting" else ("", "")
        print(f"\n{regime}\n\n| model | seed | {best[0]}last valid |\n| --- | --- | {best[1]}--- |", flush=True)
        for row in rows(regime, data, args.out, args.seeds, more):
            print(row, flush=True)


if __name__ == "__main__":
    main()
