"""From nothing to two trained, evaluated and sampled language models in a few minutes on two cores.

The text is sentences of the documentation that comes with Python; everything made stays in the folder ``demo``.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

import fairseq_ms  # noqa: F401  (registers the models and keeps other packages' messages off the screen)
from commands import ROOT, program, run, train
from evaluation import evaluate, shown, table
from figure import draw_curves
from models import MODELS, PROMPTS, UPDATES, as_arguments, training


def prepare(out: Path) -> Path:
    """The demo corpus, binarised; nothing is done again when it is there."""
    data = out / "data"
    if not (data / "manifest.json").is_file():
        prepare_script = ROOT / "preprocess" / "stdlib_docs" / "prepare.py"
        run([sys.executable, str(prepare_script), "--out", str(data)], out / "prepare.log")
    return data


def sample(data: Path, checkpoint: Path, log: Path) -> list[tuple[str, str]]:
    """Each prompt with a continuation drawn from the model."""
    printed = run(
        [
            *program("fairseq-interactive"),
            str(data / "bin"),
            *("--user-dir", "fairseq_ms", "--task", "language_modeling", "--path", str(checkpoint), "--cpu"),
            *("--tokenizer", "moses", "--bpe", "subword_nmt", "--bpe-codes", str(data / "codes.bpe")),
            *("--sampling", "--sampling-topk", "20", "--temperature", "0.7", "--beam", "1"),
            *("--max-len-a", "0", "--max-len-b", "60", "--seed", "5"),
            *("--buffer-size", str(len(PROMPTS)), "--batch-size", str(len(PROMPTS))),
        ],
        log,
        text="\n".join(PROMPTS) + "\n",
    )
    texts = dict(re.findall(r"^D-(\d+)\t\S+\t(.*)$", printed, re.MULTILINE))
    return [(prompt, texts[str(row)]) for row, prompt in enumerate(PROMPTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "demo", help="folder for everything that is made")
    parser.add_argument("--updates", type=int, default=UPDATES, help="updates of each model (default: %(default)s)")
    args = parser.parse_args()
    out = args.out.resolve()
    began = time.monotonic()
    out.mkdir(exist_ok=True, parents=True)
    print("1. Text: sentences of the documentation of Python's standard library", flush=True)
    data = prepare(out)
    counts = json.loads((data / "manifest.json").read_text())["splits"]
    print(
        f"   {counts['train']['words']:,} words to train on, {counts['valid']['words']:,} and "
        f"{counts['test']['words']:,} held out",
        flush=True,
    )
    print(f"2. Training: {args.updates} updates of each model", flush=True)
    for name, flags in MODELS.items():
        folder = out / name
        folder.mkdir(exist_ok=True)
        command = [
            *program("fairseq-train"),
            str(data / "bin"),
            *("--user-dir", "fairseq_ms", "--save-dir", str(folder)),
            *as_arguments(flags),
            *as_arguments(training(args.updates)),
        ]
        train(command, folder / "train.log", args.updates, name)
    print("3. Evaluation\n", flush=True)
    for split in ("valid", "test"):
        rows = [evaluate(name, data / "bin", out / name, counts[split], split) for name in MODELS]
        print(table(rows, split) + "\n", flush=True)
    curves = out / "training_curves.png"
    draw_curves({name: out / name / "train.log" for name in MODELS}, curves)
    print(f"   training curves: {shown(curves)}\n", flush=True)
    print("4. Samples of retina_lm\n", flush=True)
    for prompt, text in sample(data, out / "retina_lm" / "checkpoint_best.pt", out / "retina_lm" / "samples.log"):
        print(f"   [{prompt}]{text.removeprefix(prompt)}\n")
    print(f"done in {time.monotonic() - began:.0f} s; everything is in {shown(out)}")


if __name__ == "__main__":
    main()
