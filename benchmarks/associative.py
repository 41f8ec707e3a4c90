"""How many pairs a model recalls by the size of its cache: multi-query associative recall, in minutes a point.

    python -m benchmarks.associative --out FOLDER [--only MODEL...] [--seeds N] [--minutes N] [--report PAGE]

After Zoology (Arora et al. 2023, arXiv:2312.04927): a row begins with pairs of a key and its value; later, among random
tokens, every key comes once more, at gaps drawn from a power law, and the model has to predict its value. Smaller here:
8 pairs and 64 tokens where the paper goes to 64 and 512, 256 symbols for 8,192, 38,400 rows, two layers of 64, and
Muon at one rate. A point that is done is one line of FOLDER/records.jsonl; the same command goes on with the others.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.device import facts
from benchmarks.records import Records
from benchmarks.report import table_of, wrapped
from benchmarks.table import NUMBERS, Options, Record
from benchmarks.windows import OF_ADAMW, keys_a_head, parse
from fairseq_ms.core import (
    Retina,
    RetinaConfig,
    Scale,
    TransformerQL,
    TransformerQLConfig,
    Vanilla,
    VanillaConfig,
    muon_and_adamw,
)
from fairseq_ms.tools.report import check_outputs, plot_panel, write_png, write_text

# Exponent of the gaps' power law, as in the paper.
POWER = 0.01
# One of so many keys of full attention, or nearly so.
SHARES = (8, 4, 2)
# Of Muon, and the share of updates in which it rises.
RATE, WARMUP = 0.02, 0.05
Model = Vanilla | Retina | TransformerQL


class Size(NamedTuple):
    """Shapes of all points."""

    pairs: int = 8
    length: int = 64
    symbols: int = 256
    rows: int = 64
    updates: int = 600
    tested: int = 1024
    dim: int = 64


QUICK = Size(pairs=2, length=32, symbols=40, rows=4, updates=3, tested=8, dim=16)
HEADS = 8


class Point(NamedTuple):
    """A model by what --only takes, keys that a head remembers, and how it is built for so many symbols."""

    model: str
    keys: float
    build: Callable[[], Model]

    def key(self, seed: int) -> str:
        """Of its line in the records."""
        return f"{self.model} | {self.keys:g} | seed {seed}"


def points(size: Size) -> list[Point]:
    """Every kind of model at an eighth, a quarter and half of the keys of full attention; all but Transformer-QL have
    the short convolution, without which full attention comes, too."""
    shared: dict[str, Any] = {
        "vocab_size": size.symbols, "dim": size.dim, "ffn_dim": 2 * size.dim, "heads": HEADS, "dropout": 0.0,
        "attention_dropout": 0.0,
    }  # fmt: skip
    rotary = {**shared, "layers": 2, "positions": "rotary", "short_conv": 3}

    def windows(name: str, text: str) -> Point:
        turns = parse(text, HEADS)
        return Point(name, keys_a_head(turns, size.length), lambda: Retina(RetinaConfig(scales=turns[0], **rotary)))

    def ql(window: int) -> Point:
        sizes: dict[str, Any] = {
            "segment_len": window // 2,
            "mem_len": window // 2,
            "output_layers": 1,
            "droppath": 0.0,
        }
        scales = (Scale(1, layers=1), Scale(2, layers=1))
        build = lambda: TransformerQL(TransformerQLConfig(scales=scales, **sizes, **shared))  # noqa: E731
        return Point("Transformer-QL", float(window), build)

    found = [
        Point("full", float(size.length), lambda: Vanilla(VanillaConfig(**rotary))),
        Point(
            "full, no convolution", float(size.length), lambda: Vanilla(VanillaConfig(**{**rotary, "short_conv": 0}))
        ),
    ]
    for part in SHARES:
        window = size.length // part
        small = min(4, window // 2)
        grouped = {"kv_heads": HEADS // part, **rotary}
        far = (2 * window - 4) // 4 * 4
        found += [
            windows("window", f"1x=0:{window}"),
            windows("two widths", f"1x=0:{small}*4,1x=0:{2 * window - small}*4"),
            Point("key/value heads", float(window), lambda own=grouped: Vanilla(VanillaConfig(**own))),
            windows("blocks of 4", f"1x=0:{max(4, far - size.length // 8)}*4,4x={max(4, far - size.length // 8)}:*4"),
            ql(window),
        ]
    return found


def batch(size: Size, rows: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (B, T), and targets (B, T): the value where a key comes again, -100 elsewhere."""
    half, slots = size.symbols // 2, (size.length - 2 * size.pairs) // 2
    weights = POWER * np.arange(1, slots + 1) ** (POWER - 1.0)
    tokens = rng.integers(0, size.symbols, (rows, size.length))
    targets = np.full((rows, size.length), -100)
    for row in range(rows):
        keys = rng.choice(half, size.pairs, replace=False)
        values = half + rng.choice(half, size.pairs, replace=False)
        tokens[row, : 2 * size.pairs] = np.stack([keys, values], axis=1).ravel()
        gaps = rng.choice(slots, size.pairs, replace=False, p=weights / weights.sum())
        places = 2 * size.pairs + 2 * gaps
        tokens[row, places], targets[row, places] = keys, values
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def segments(model: Model, *parts: Tensor) -> list[tuple[Tensor, ...]]:
    """Tensors (B, T) as the model reads them: whole, or in the segments of its memory."""
    length = model.config.segment_len if isinstance(model, TransformerQL) else parts[0].size(1)
    return list(zip(*(part.split(length, dim=1) for part in parts)))


def train(point: Point, size: Size, seed: int) -> dict[str, float]:
    """Accuracy on rows that it has not seen, and seconds an update."""
    torch.manual_seed(seed)
    rng, model, began = np.random.default_rng(seed), point.build().train(), time.process_time()
    optimizer = muon_and_adamw(model, RATE, OF_ADAMW * RATE)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(size.updates):
        warm = min(1.0, (step + 1) / (WARMUP * size.updates))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * warm * 0.5 * (1.0 + math.cos(math.pi * step / size.updates))
        tokens, targets = batch(size, size.rows, rng)
        state: Any = model.new_state(size.rows) if isinstance(model, TransformerQL) else None
        asked = int((targets >= 0).sum())
        for own, wanted in segments(model, tokens, targets):
            if state is not None or bool((wanted >= 0).any()):
                answers = max(1, int((wanted >= 0).sum()))
                (model.loss(own, wanted, state=state) * (answers / asked)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = (time.process_time() - began) / size.updates
    return {"accuracy": round(accuracy(model.eval(), size, seed + 1000), 4), "step": round(seconds, 4)}


@torch.no_grad()
def accuracy(model: Model, size: Size, seed: int) -> float:
    """The share of questions whose value is the most probable symbol."""
    rng, right, asked = np.random.default_rng(seed), 0, 0
    for _ in range(max(1, size.tested // size.rows)):
        tokens, targets = batch(size, size.rows, rng)
        state = model.new_state(size.rows)
        for own, wanted in segments(model, tokens, targets):
            logits, state = model(own, state)
            right += int(((logits.argmax(-1) == wanted) & (wanted >= 0)).sum())
            asked += int((wanted >= 0).sum())
    return right / asked


def accuracies(records: Mapping[str, Record]) -> dict[str, dict[float, list[float]]]:
    """Of every seed, by model and keys a head."""
    found: dict[str, dict[float, list[float]]] = {}
    for key, line in records.items():
        model, keys, _ = key.split(" | ")
        found.setdefault(model, {}).setdefault(float(keys), []).append(line[NUMBERS]["accuracy"])
    return found


def page(records: Mapping[str, Record], machine: Mapping[str, Any], figure: str) -> str:
    """The records as Markdown, with the file of their figure."""
    size, found = Size(*machine["size"]), accuracies(records)
    about = (
        f"Multi-query associative recall after Zoology ([Arora et al. 2023](https://arxiv.org/abs/2312.04927)): "
        f"{size.pairs} pairs of a key and its value, then {size.length - 2 * size.pairs} tokens among which every key "
        f"comes again and its value has to be predicted; guessing gives {2 / size.symbols:.3f}. Models have two layers "
        f"of {HEADS} heads, {size.dim} wide, and all but Transformer-QL rotary positions and a short convolution; "
        f"{size.updates:,} updates of {size.rows} rows with Muon at {RATE:g}. *Keys* are what a head of "
        f"queries remembers at the end of a row, an eighth to all of it; seeds stand side by side. On "
        f"{machine['device']}, torch {machine['torch']}."
    )
    rows = []
    for model, own in found.items():
        cells = [", ".join(f"{x:.2f}" for x in own[keys]) for keys in sorted(own)]
        empty = [""] * (len(SHARES) + 1 - len(cells))
        rows.append(
            [model, ", ".join(f"{keys:g}" for keys in sorted(own)), *(cells + empty if cells[1:] else empty + cells)]
        )
    table = table_of(["model", "keys", *(f"1/{part}" for part in SHARES), "all"], rows)
    again = "    python -m benchmarks.associative --out FOLDER --report PAGE.md"
    return "\n".join(
        ["# Recall by cache", "", *wrapped(about), "", again, "", f"![Accuracy]({figure})", "", *table, ""]
    )


def draw(records: Mapping[str, Record], figure: Any) -> None:
    """Accuracy by keys a head, seeds averaged, a line a model."""
    lines = {
        model: [(keys, sum(seeds) / len(seeds)) for keys, seeds in sorted(own.items())]
        for model, own in accuracies(records).items()
    }
    plot_panel(figure.subplots(), lines, "keys a head", "accuracy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is left; 0 when nothing is, 3 when the time is over before."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.associative", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of records.jsonl")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="kinds of models")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no point after so many")
    parser.add_argument("--seeds", type=int, default=1, help="how many, of weights and data (default: 1)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--report", metavar="PAGE.md", help="write a page of the records, and PAGE.png beside it")
    args = parser.parse_args(arguments)
    check_outputs(args)
    size, end = QUICK if args.quick else Size(), time.monotonic() + 60.0 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    found = facts(Options("cpu", args.quick, threads=1))
    machine = {**{name: found[name] for name in ("device", "torch", "quick")}, "size": list(size)}
    records, over = Records(args.out / "records.jsonl", machine), False
    for seed, point in itertools.product(range(1, args.seeds + 1), points(size)):
        if point.key(seed) in records.by_key() or (args.only and point.model not in args.only):
            continue
        if over := time.monotonic() > end:
            break
        numbers = train(point, size, seed)
        records.append({"key": point.key(seed), NUMBERS: numbers})
        print(point.key(seed), numbers["accuracy"], flush=True)
    if args.report:
        known = records.by_key()
        write_text(args.report, page(known, machine, f"{Path(args.report).stem}.png"))
        write_png(str(Path(args.report).with_suffix(".png")), lambda figure: draw(known, figure), width=6.0)
    return 3 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
