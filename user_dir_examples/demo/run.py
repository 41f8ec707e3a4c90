"""Two small language models: trained, evaluated, read texts 16 times as long, and sampled, in a few minutes on a CPU.

The text is sentences of the documentation that comes with Python; everything made stays in the folder ``demo``.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import torch
from fairseq import checkpoint_utils
from fairseq.models import FairseqLanguageModel
from tqdm import tqdm

import fairseq_ms
from fairseq_ms import cli
from fairseq_ms.export import exported
from fairseq_ms.tools.training_step import seconds

# Of all commands: threads that wait for each other awake take the processor from another program that computes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["PYTHONUNBUFFERED"] = "1"
ROOT = Path(__file__).resolve().parents[2]
CONTEXT, UPDATES = 256, 400
LENGTHS = (CONTEXT, 4 * CONTEXT, 16 * CONTEXT)
SHARED = f"""
    --user-dir fairseq_ms --task language_modeling --criterion cross_entropy --tokens-per-sample {CONTEXT}
    --batch-size 4 --decoder-embed-dim 144 --decoder-ffn-embed-dim 576 --decoder-attention-heads 6 --decoder-layers 4
    --share-decoder-input-output-embed --positions rotary --dropout 0 --attention-dropout 0
    --cpu --num-workers 0 --seed 1 --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.1
    --clip-norm 1.0 --lr-scheduler cosine --lr 0.003
    --no-epoch-checkpoints --validate-interval 100 --validate-interval-updates 200
    --save-interval-updates 200 --keep-interval-updates 1 --log-format json --log-interval 20
"""
MODELS = {
    "vanilla_lm": "--arch vanilla_lm",
    "retina_lm": "--arch retina_lm --scale-windows 1x=0:8*3,1x=0:128*3",
}
SAMPLING = ["--cpu", "--max-len-b", "150", "--temperature", "0.7", "--sampling-topk", "20"]
PROMPTS = ("Return True if", "Note that the user")
NEXT = """
What to type next, with a folder of your own texts for FOLDER:

  . .venv/bin/activate
  fairseq-ms prepare text --input FOLDER --out data/mine --bpe hf_byte_bpe --bpe-merges 8000
  fairseq-ms train retina_lm_long_2048 --data data/mine/bin --max-update 1200
  fairseq-ms perplexity checkpoints/retina_lm_long_2048/checkpoint_best.pt
  fairseq-ms sample checkpoints/retina_lm_long_2048/checkpoint_best.pt --prompt "The old man"

The demo's own model writes more by:

  fairseq-ms sample {best} --prompt "This function"
"""


def run(log: Path, *words: str | Path) -> str:
    """Run a command of ``fairseq-ms`` and return what it printed, also to ``log``; it says itself why it fails."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.main(list(map(str, words)))
    log.write_text(printed.getvalue())
    if code:
        raise SystemExit(f"demo: fairseq-ms {words[0]} failed")
    return printed.getvalue()


def train(command: list[str], log: Path, updates: int, title: str) -> None:
    """Run ``fairseq-train`` to its last update, its losses in ``log``; a run that was stopped goes on."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    last, (columns, rows) = "", shutil.get_terminal_size()
    with (
        log.open("a") as output,
        subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=both) as process,
        tqdm(total=updates, desc=f"  {title}", unit="update", ncols=columns, nrows=rows, mininterval=0.5) as bar,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            output.write(line)
            last = line if line.strip() else last
            for found in re.findall(r"train_inner \| (\{.*\})", line):
                record = json.loads(found)
                bar.set_postfix_str(f"loss {record['loss']} bits, {float(record['wps']):,.0f} tokens/s", refresh=False)
                bar.update(int(record["num_updates"]) - bar.n)
        process.wait()
        bar.update(updates - bar.n if process.returncode == 0 else 0)
    if process.returncode < 0:
        raise SystemExit(
            f"demo: training {title} was killed by {signal.Signals(-process.returncode).name}; "
            f"the same command goes on with it (its output is in {log})"
        )
    if process.returncode:
        raise SystemExit(f"demo: training {title} failed ({last.strip()}); its output is in {log}")


def perplexity(data: Path, folder: Path, split: str, tokens: int, context: int) -> dict[str, float]:
    """What ``fairseq-ms perplexity`` prints of the best checkpoint, in windows that overlap by ``context`` tokens."""
    numbers = folder / f"perplexity-{split}-{tokens}.json"
    flags: list[str | Path] = ["--data", data, "--gen-subset", split, "--batch-size", "16", "--cpu", "--json", numbers]
    windows = ["--tokens-per-sample", str(tokens), "--context-window", str(context)]
    run(numbers.with_suffix(".log"), "perplexity", folder / "checkpoint_best.pt", *flags, *windows)
    found: dict[str, float] = json.loads(numbers.read_text())
    return found


def compare(data: Path, out: Path) -> None:
    """Print a table: both models on the test split, in windows of ``CONTEXT`` tokens with a stride of half of it."""
    print(f"{'':12} {'perplexity':>18} {'bits per':>9}")
    print(f"{'':12} {'subword':>8} {'word':>9} {'byte':>9}")
    for name in MODELS:
        found = perplexity(data, out / name, "test", CONTEXT, CONTEXT // 2)
        numbers = found["perplexity"], found["word_perplexity"], found["bits_per_byte"]
        print("{:12} {:8.2f} {:9.2f} {:9.3f}".format(name, *numbers), flush=True)
    print()


def lengthen(data: Path, out: Path) -> None:
    """Print a table: what longer texts than those of the training cost both models, and how well they read them."""
    # Several threads would wait for each other awake, for long where another program has a processor.
    torch.set_num_threads(1)
    models = {}
    for name in MODELS:
        path, overrides = str(out / name / "checkpoint_best.pt"), {"data": str(data)}
        (models[name],), _ = checkpoint_utils.load_model_ensemble([path], arg_overrides=overrides)
    print(f"{'':8} {'perplexity, valid':>22} {'training, ms a token':>22} {'caches, kB':>22}")
    print(f"{'tokens':>8}" + 3 * (f" {'vanilla':>12} {'retina':>9}"))
    for tokens in LENGTHS:
        read = [f"{perplexity(data, out / name, 'valid', tokens, 0)['perplexity']:.1f}" for name in MODELS]
        spent = [f"{1000 * seconds(models[name], 1, tokens) / tokens:.2f}" for name in MODELS]
        held = [f"{cache_bytes(models[name].eval(), tokens) / 1000:,.0f}" for name in MODELS]
        print(f"{tokens:8,}" + "".join(f" {pair[0]:>12} {pair[1]:>9}" for pair in (read, spent, held)), flush=True)
    print()


@torch.no_grad()
def cache_bytes(model: FairseqLanguageModel, tokens: int) -> int:
    """Bytes of all that a model remembers of a text when it generates, but for a few that say what they are."""
    core = model.decoder.core
    state = core.new_state(1, tokens)
    core.features(torch.full((1, tokens), 4), state)
    return len(pickle.dumps(list(state.parts())))


def show_shipped() -> None:
    """What the model in the package, where there is one, writes, and what it costs to go on with a long file."""
    if not (exported.SHIPPED / "config.json").is_file():
        return
    print("The model that comes with the package, before anything is trained:\n", flush=True)
    options = ["--max-len-b", "120", "--temperature", "1", "--seed", "1", "--cpu"]
    sample = ["-m", "fairseq_ms", "sample", "--prompt", "def read_", *options]
    for program in (sample, [str(ROOT / "user_dir_examples" / "shipped" / "complete.py")]):
        subprocess.run([sys.executable, *program], check=True)
        print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "demo", help="folder for everything that is made")
    parser.add_argument("--updates", type=int, default=UPDATES, help="updates of each model (default: %(default)s)")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    fairseq_ms.register()
    out, began = args.out.resolve(), time.monotonic()
    out.mkdir(exist_ok=True, parents=True)
    show_shipped()
    data, best = out / "data", out / "retina_lm" / "checkpoint_best.pt"
    print("1. Text: sentences of the documentation of Python's standard library", flush=True)
    if not (data / "manifest.json").is_file():
        run(out / "prepare.log", "prepare", "stdlib_docs", "--out", data, "--quiet")
    splits = json.loads((data / "manifest.json").read_text())["splits"]
    words = [f"{splits[split]['words']:,}" for split in ("train", "valid", "test")]
    print(f"   {words[0]} words to train on, {words[1]} and {words[2]} held out")
    print(f"2. Training: {args.updates} updates of each model", flush=True)
    logs = {name: out / name / "train.log" for name in MODELS}
    for name, own in MODELS.items():
        (out / name).mkdir(exist_ok=True)
        length = ["--max-update", str(args.updates), "--warmup-updates", str(max(1, args.updates // 10))]
        sources = [str(data / "bin"), "--save-dir", str(out / name)]
        flags = [*sources, *shlex.split(SHARED), *shlex.split(own), *length]
        program = [sys.executable, str(Path(sys.executable).parent / "fairseq-train")]
        train([*program, *flags], logs[name], args.updates, name)
    print(f"3. Evaluation: test split, windows of {CONTEXT} tokens, stride {CONTEXT // 2}\n", flush=True)
    compare(data / "bin", out)
    print(f"4. Longer texts than the {CONTEXT} tokens of the training; half a minute\n", flush=True)
    lengthen(data / "bin", out)
    png = out / "training_curves.png"
    run(out / "curves.log", "plot", "curves", *logs.values(), "--gen-subset", "train", "--png", png)
    print("5. Samples of retina_lm\n", flush=True)
    for seed, prompt in enumerate(PROMPTS, 1):
        written = run(out / f"sample-{seed}.log", "sample", best, "--prompt", prompt, "--seed", str(seed), *SAMPLING)
        print(textwrap.indent(written.strip(), "   ") + "\n", flush=True)
    print(f"done in {time.monotonic() - began:.0f} s; everything, training curves too, is in {out}")
    print(NEXT.format(best=os.path.relpath(best)), end="")


if __name__ == "__main__":
    main()
