"""Train HAED on characters with and without its first phase, for the same time, and compare.

    python user_dir_examples/haed/demo.py [--seconds 90] [--out demo/haed]
    python user_dir_examples/haed/demo.py --data /path/to/data-bin --runs hred,hred_transformer,haed,haed_iem

Without ``--data``, the text is the documentation that comes with Python. ``--seconds`` is the training time of each
model, the first phase included; it takes half of it, on one half of the text, and the second phase has the other. Each
model is then evaluated on the test split, and the last one writes some text. The models are the paper's, made smaller
so that a laptop sees enough of the data, and so is their training (Appendix A: gradients are clipped at 0.01, and the
main transformer has a lower rate), but for rates that stay, since a time has no last update.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from fairseq_ms.tools import report

# Of all commands: threads that wait for each other awake take the processor from another program that computes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["PYTHONUNBUFFERED"] = "1"
ROOT = Path(__file__).resolve().parents[2]
USER_DIR = ROOT / "fairseq_ms"

# Tells folders of earlier demos, which may be trained over, from a user's own.
MARK = ".made-by-haed-demo"
TRANSFORMER = {"decoder_layers": 3, "decoder_ffn_embed_dim": 712}
LSTM_ENCODER = {"encoder_units": 256}
# What each run is called, and what is smaller than in the paper's configuration of the same name.
RUNS: dict[str, tuple[str, dict[str, int]]] = {
    "hred": ("HRED", {**LSTM_ENCODER, "main_units": 700}),
    "hred_transformer": ("HRED with transformer", {**LSTM_ENCODER, **TRANSFORMER}),
    "haed": ("HAED", TRANSFORMER),
    "haed_iem": ("HAED after IEM", TRANSFORMER),
}
# The main transformer's learning rate beside that of the other parts (Appendix A).
SLOWER = 0.00035 / 0.002


def command(name: str, *arguments: str | Path, show: str | None = None) -> str:
    """Run a command of the environment and return what it printed; lines that match ``show`` are passed on."""
    program, lines = [sys.executable, str(Path(sys.executable).parent / name), *map(str, arguments)], []
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if show and re.search(show, line):
                print("  " + re.sub(r"^(\[.*?\])+ - ", "", line).strip()[:160], flush=True)
    if process.returncode != 0:
        raise SystemExit("".join(lines[-20:]) + f"{name} failed")
    return "".join(lines)


def documentation(folder: Path) -> Path:
    """Characters of the standard library's documentation as fairseq's data folder."""
    from fairseq_ms_pipeline.stdlib_docs import corpus, library_folder, split_by_module

    if (folder / "characters" / "manifest.json").is_file():
        return folder / "characters" / "bin"
    texts = corpus(library_folder())
    splits = split_by_module(texts, 1, 0.05)
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        lines = [line for name, paragraphs in texts.items() if splits[name] == split for line in paragraphs]
        (folder / "text" / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command("fairseq-ms", "prepare", "chars", "--input", folder / "text", "--quiet", "--out", folder / "characters")
    return folder / "characters" / "bin"


def empty_folders(out: Path, runs: list[str]) -> None:
    """Empty folders for these runs: fairseq would go on from the checkpoints of an earlier demo."""
    folders = [out / run for run in (*runs, *(f"{run}_first" for run in runs if run == "haed_iem"))]
    for folder in folders:
        if folder.exists() and not (folder / MARK).is_file():
            raise SystemExit(
                f"demo.py: error: --out must be a folder for the demo alone: {folder} is not of its making"
            )
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / MARK).touch()


def train(run: str, data: Path, save: Path, seconds: float, arguments: argparse.Namespace) -> Path:
    """Train one model for that long and return its checkpoint."""
    from fairseq_ms.cli import main as fairseq_ms

    title, smaller = RUNS[run]

    def phase(config: str, folder: Path, until: float, *more: str) -> Path:
        parts = ["encoder", "main", *([] if config == "iem" else ["decoder"])]
        # fairseq counts the time of the checkpoint that training starts from, so a second phase has what is left.
        settings = [
            *(f"task.tokens_per_sample={arguments.tokens}", f"dataset.batch_size={arguments.batch_size}", *more),
            *(f"model.{flag}={size}" for flag, size in {**smaller, "decoder_units": arguments.decoder_units}.items()),
            *("common.log_interval=50", "dataset.disable_validation=true", "dataset.num_workers=1"),
            *("common.cpu=true", f"common.seed={arguments.seed}", f"common.user_dir={USER_DIR}"),
            *(f"checkpoint.save_dir={folder.absolute()}", f"hydra.run.dir={folder.absolute()}/hydra"),
            f"optimization.stop_time_hours={until / 3600}",
        ]
        for part in parts:
            group, slower = f"optimizer.groups.{part}", part == "main" and run != "hred"
            rate = arguments.lr * (SLOWER if slower else 1.0)
            settings += [f"{group}.lr_float={rate}", f"{group}.optimizer.lr=[{rate}]"]
            if run != "hred":
                # The first phase collapses with a short one.
                settings.append(f"{group}.lr_scheduler.warmup_updates={100 if config == 'iem' else 30}")
        # So many that the cosine does not fall.
        written = ("--data", str(data), "--max-update", "100000000", "--out", str(folder / "run.yaml"))
        if fairseq_ms(["config", f"characters_{config}", *written]):
            raise SystemExit(2)
        command(
            "fairseq-hydra-train", "--config-dir", folder.absolute(), "--config-name", "run", *settings, show=" loss="
        )
        return folder / "checkpoint_last.pt"

    if run != "haed_iem":
        print(f"{title}: end to end, {seconds:.0f} s", flush=True)
        return phase(run, save / run, seconds)
    print(f"{title}: first phase, {seconds / 2:.0f} s", flush=True)
    first = phase("iem", save / f"{run}_first", seconds / 2)
    print(f"{title}: end to end, {seconds / 2:.0f} s", flush=True)
    return phase("finetune", save / run, seconds, f"checkpoint.finetune_from_model={first.absolute()}")


def bits(checkpoint: Path, data: Path, arguments: argparse.Namespace) -> float:
    """Bits per token on the test split."""
    printed = command(
        *("fairseq-eval-lm", data, "--user-dir", USER_DIR, "--path", checkpoint, "--cpu"),
        *("--tokens-per-sample", str(arguments.tokens), "--batch-size", "8"),
    )
    found = re.search(r"Loss \(base 2\): ([\d.]+)", printed)
    assert found is not None, printed
    return float(found[1])


def updates(checkpoint: Path) -> int:
    """How many updates a checkpoint has seen."""
    import torch

    return int(torch.load(checkpoint, weights_only=True)["optimizer_history"][-1]["num_updates"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="fairseq's data folder (default: documentation of Python)")
    parser.add_argument("--runs", default="haed,haed_iem", help=f"some of {','.join(RUNS)} (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=90.0, help="training time of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo") / "haed", help="(default: %(default)s)")
    parser.add_argument("--decoder-units", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=768, help="characters in a row (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.002, help="of encoder and decoder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    runs = arguments.runs.split(",")
    unknown = [run for run in runs if run not in RUNS]
    if unknown or not arguments.seconds > 0:
        parser.error(f"--runs must be some of {','.join(RUNS)}, and --seconds positive: got {arguments.runs!r}")
    empty_folders(arguments.out, runs)
    data = arguments.data or documentation(arguments.out)
    table = {}
    checkpoint = Path()
    for run in runs:
        checkpoint = train(run, data, arguments.out, arguments.seconds, arguments)
        table[run] = {"bits": bits(checkpoint, data, arguments), "updates": updates(checkpoint)}
    symbols = sum(1 for _ in (data / "dict.txt").open(encoding="utf-8"))
    print(f"\n{'after ' + format(arguments.seconds, '.0f') + ' s of training':28s} bits per token   updates end to end")
    print(f"{'(any of the symbols)':28s} {math.log2(symbols):14.3f}")
    for run, found in table.items():
        print(f"{RUNS[run][0]:28s} {found['bits']:14.3f} {found['updates']:20d}")
    report.write_json(arguments.out / "results.json", {"seconds": arguments.seconds, "runs": table})
    print("\nThe last model goes on from 'Return the ':")
    drawn = ("--sampling-topk", "0", "--sampling-topp", "0.9", "--seed", "3", "--cpu")
    print(command("fairseq-ms", "sample", checkpoint, "--prompt", "Return the ", *drawn))


if __name__ == "__main__":
    main()
