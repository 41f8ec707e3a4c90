"""Which windows pay at equal cache: models of every kind of windows, trained alike and compared where it counts.

    python -m benchmarks.windows CORPUS... --out FOLDER [--only ARM...] [--minutes N] [--report PAGE] [--also FOLDER...]

A CORPUS is a folder that ``fairseq-ms prepare`` has made, such as that of ``prepare code``. Every arm is trained for a
tenth of the tokens at rates that double until the best is not the last, and then, at the best, as a whole, with each of
its seeds. A run that is done is one line of FOLDER/records.jsonl. Stopped by --minutes or SIGTERM, or killed, the same
command goes on; --report makes a page of the lines that there are, and its figure beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.device import facts
from benchmarks.records import Records
from benchmarks.report import table_of, wrapped
from benchmarks.table import FAILED, NUMBERS, Options, Record
from fairseq_ms.core import Retina, RetinaConfig, Vanilla, VanillaConfig, muon_and_adamw
from fairseq_ms.core.ops.device import wait_for
from fairseq_ms.core.scales import Scale, window_turns
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.scales import window_scales
from fairseq_ms.tools.report import check_outputs, plot_panel, powers_of_two, write_png, write_text
from fairseq_ms_pipeline.files import complete
from fairseq_ms_pipeline.indexed import read_symbols, read_tokens

# Of Muon; AdamW's is a fixed part of it, so that one number is searched, from the middle on.
RATES, OF_ADAMW = (0.01, 0.02, 0.04, 0.08), 0.3
TUNING, WARMUP, SAVE_SECONDS = 0.1, 0.05, 180.0
# Distances back to the last occurrence of a pair of tokens, and positions, up to which losses are told apart.
DISTANCES, POSITIONS = (8, 64, 256, 512, 1024), tuple(2**power for power in range(4, 13))
COLUMNS = [*(f"to {d}" for d in DISTANCES), "beyond", "never"]
# Windows as narrow as this do what a short convolution does, and stay so where others grow with the text.
NARROW = 8
PARTS, BARE = {"short_conv": 3, "qk_norm": "scaled"}, {"short_conv": 0, "qk_norm": False}
# Columns of a model whose parameters one head of keys and values leaves to the FFN.
ONE_KEY_HEAD = {"kv_heads": 1, "ffn_dim": 702}


class Arm(NamedTuple):
    """A row: what --only takes, windows (``parse``) for 1,024 tokens, other ``PARTS``, how many seeds, and windows in
    the first ``START`` of its steps, where these are others."""

    name: str
    windows: str
    parts: Mapping[str, Any] = {}
    seeds: int = 1
    early: str | None = None

    def share(self, heads: int) -> float:
        """Of the keys and values of as many heads as queries have, how many there are."""
        return self.parts.get("kv_heads", heads) / heads


START = 0.02

# The most valuable first. All but full ones remember 128 keys a head, or the 1,024 of one head of eight.
ARMS = [
    Arm("full", "1x=0:", seeds=2),
    Arm("full, no convolution", "1x=0:", {"short_conv": 0}, seeds=2),
    Arm("four small heads", "1x=0:8*4,1x=0:248*4", seeds=2),
    Arm("one key/value head", "1x=0:", ONE_KEY_HEAD, seeds=2),
    Arm("six small heads", "1x=0:8*6,1x=0:488*2", seeds=2),
    Arm("window 128", "1x=0:128"),
    Arm("by layer, wide last", "1x=0:8|1x=0:8|1x=0:8|1x=0:488"),
    Arm("by layer, wide first", "1x=0:488|1x=0:8|1x=0:8|1x=0:8"),
    Arm("full, a window of 8 first, no convolution", "1x=0:", {"short_conv": 0}, early="1x=0:8"),
    Arm("full, two taps", "1x=0:", {"short_conv": 2}),
    Arm("four small heads, two taps", "1x=0:8*4,1x=0:248*4", {"short_conv": 2}),
]
# Rows of older records, whose models are not built any more.
OLDER = {
    "small heads": "1x=0:8*2,1x=0:168*6",
    "small heads, full ones": "1x=0:8*2,1x=0:*6",
    "tokens and gated blocks": "1x=0:8*2,1x=0:112+16x=112:*6",
    "full, neither": "1x=0:",
    "small heads, full ones, no convolution": "1x=0:8*2,1x=0:*6",
    "four widths, growing": "1x=0:9*2,1x=0:18*2,1x=0:36*2,1x=0:73*2|1x=0:18*2,1x=0:36*2,1x=0:73*2,1x=0:146*2|"
    "1x=0:36*2,1x=0:73*2,1x=0:146*2,1x=0:291*2|1x=0:73*2,1x=0:146*2,1x=0:291*2,1x=0:583*2",
    "far heads": "1x=0:8*2,1x=0:224*4,16x=224:*2",
    "four small heads, full ones": "1x=0:8*4,1x=0:*4",
    "window 256": "1x=0:256",
    "tokens and blocks": "1x=0:8*2,1x=0:112+16x=112:*6",
    "tokens and gated blocks, not turned": "1x=0:8*2,1x=0:112+16x=112:*6",
}

# The first two have 1 and 16 million parameters outside embeddings; the last shows that everything runs.
Size = namedtuple("Size", "dim heads layers length rows tokens held_out")
SIZES = {
    "cpu": Size(144, 8, 4, 1024, 4, 15e6, 256),
    "gpu": Size(512, 8, 5, 4096, 4, 480e6, 256),
    "quick": Size(16, 8, 4, 64, 2, 1024, 4),
}


class Job(NamedTuple):
    """A run: as a whole, or to tune its rate."""

    corpus: str
    arm: Arm
    seed: int
    rate: float
    tuning: bool

    @property
    def key(self) -> str:
        """Of its line in the records."""
        run = f"rate {self.rate:g}" if self.tuning else f"seed {self.seed} rate {self.rate:g}"
        return f"{self.corpus} | {self.arm.name} | {run}"


def parse(text: str, heads: int, stretch: int = 1) -> list[tuple[Scale, ...]]:
    """The windows of each layer in turn, as ``--scale-windows`` has them, bounds above ``NARROW`` times ``stretch``.

    Raises ValueError for what is no window, and for heads that do not add up.
    """
    layers = [
        tuple(replace(w, near=_stretched(w.near, stretch), far=w.far and _stretched(w.far, stretch)) for w in windows)
        for windows in window_scales(text)
    ]
    return [tuple(windows) for windows in window_turns(layers, heads, len(layers))]


def _stretched(bound: int, stretch: int) -> int:
    return bound * stretch if bound > NARROW else bound


def keys_a_head(layers: Sequence[Sequence[Scale]], length: int) -> float:
    """Positions that a head remembers of a text of T tokens, heads and layers averaged."""
    windows = [window for turn in layers for window in turn]
    keys = sum(w.heads * ((min(w.far or length, length) - w.near) // w.factor) for w in windows)
    return keys / sum(w.heads for w in windows)


def build(arm: Arm, size: Size, symbols: int, seed: int, early: bool = False) -> Vanilla | Retina:
    """The model of an arm, with new weights, or with the windows that it has ``early``."""
    torch.manual_seed(seed)
    sizes = {"dim": size.dim, "ffn_dim": 4 * size.dim, "heads": size.heads, "layers": size.layers}
    start = {"init_residual": "scaled", "embedding_init_std": 0.1, "dropout": 0.0, "attention_dropout": 0.0}
    config: dict[str, Any] = {**sizes, **start, "vocab_size": symbols, "positions": "rotary", **PARTS, **arm.parts}
    if arm.windows == "1x=0:" and arm.early is None:
        return Vanilla(VanillaConfig.from_dict(config))
    windows = arm.early if early and arm.early else arm.windows
    return Retina(RetinaConfig(scales=tuple(parse(windows, size.heads, max(1, size.length // 1024))), **config))


def narrowed(model: Vanilla | Retina, arm: Arm, size: Size, symbols: int) -> Vanilla | Retina:
    """The model with the windows of its first steps and the same parameters."""
    if arm.early is None:
        return model
    other = build(arm, size, symbols, 0, early=True).to(next(model.parameters()).device)
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return other


class Corpus:
    """The tokens of a prepared folder, memory-mapped; UsageError where there are none."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.resolve().name
        files = [folder / "bin" / name for name in ("dict.txt", "train.idx", "train.bin", "valid.idx", "valid.bin")]
        if missing := [file.name for file in files if not file.is_file()]:
            raise UsageError(f"CORPUS must be a folder that fairseq-ms prepare made: {folder}/bin has no {missing[0]}")
        self.symbols = len(read_symbols(files[0]))
        self.tokens = {split: read_tokens(folder / "bin" / split) for split in ("train", "valid")}

    def rows(self, split: str, starts: np.ndarray, length: int) -> Tensor:
        """Rows (R, T + 1) from these places on."""
        return torch.from_numpy(np.stack([self.tokens[split][s : s + length + 1] for s in starts]).astype(np.int64))

    def batch(self, size: Size, seed: int, step: int) -> Tensor:
        """The rows of an update, which seed and number of the update decide."""
        last = len(self.tokens["train"]) - size.length
        return self.rows("train", np.random.default_rng([seed, step]).integers(0, last, size.rows), size.length)

    def held_out(self, size: Size) -> Iterator[Tensor]:
        """Rows of the validation text, evenly spread, as many at a time as an update has."""
        last = len(self.tokens["valid"]) - size.length - 1
        starts = np.linspace(0, last, min(size.held_out, last // size.length), dtype=np.int64)
        yield from (self.rows("valid", part, size.length) for part in np.array_split(starts, len(starts) // size.rows))


def distances_back(row: Sequence[int]) -> list[int]:
    """For each target of a row (T + 1), how far back it last followed the same token; 0 where it never did: (T)."""
    last: dict[tuple[int, int], int] = {}
    found = []
    for place, pair in enumerate(itertools.pairwise(row)):
        found.append(place - last.get(pair, place))
        last[pair] = place
    return found


@torch.no_grad()
def evaluate(model: Vanilla | Retina, corpus: Corpus, size: Size, device: torch.device) -> dict[str, Any]:
    """Losses in nats: all, late (over the second half), by position, and by distance back, with the share of each."""
    losses: list[Tensor] = []
    back: list[list[int]] = []
    for rows in corpus.held_out(size):
        tokens = rows.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model.logits(model.features(tokens[:, :-1]))
        losses.append(F.cross_entropy(logits.float().mT, tokens[:, 1:], reduction="none").double().cpu())
        back.extend(map(distances_back, rows.tolist()))
    loss_RT, back_RT = torch.cat(losses), torch.tensor(back)
    at = loss_RT.mean(0)
    column_RT = torch.bucketize(back_RT, torch.tensor(DISTANCES)).masked_fill(back_RT == 0, len(DISTANCES) + 1)
    of_column = {name: loss_RT[column_RT == place] for place, name in enumerate(COLUMNS)}
    ends = [end for end in POSITIONS if end <= size.length]
    return {
        "all": round(float(at.mean()), 4),
        "late": round(float(at[size.length // 2 :].mean()), 4),
        "position": {f"to {b}": round(float(at[a:b].mean()), 4) for a, b in itertools.pairwise([0, *ends])},
        "distance": {name: round(float(found.mean()), 4) for name, found in of_column.items() if len(found)},
        "share": {name: round(len(found) / loss_RT.numel(), 4) for name, found in of_column.items() if len(found)},
    }


class Trainer:
    """Trains jobs in ``out``, each until it is done or ``deadline`` (``time.monotonic``) has come and it is saved."""

    def __init__(self, size: Size, out: Path, device: torch.device, deadline: float) -> None:
        self.size, self.out, self.device, self.deadline = size, out, device, deadline
        self.clock = time.process_time if device.type == "cpu" else time.perf_counter

    def run(self, job: Job, corpus: Corpus) -> Record | None:
        """The line of a job; None if the time is over before it is done."""
        size, name = self.size, job.key.replace(" | ", ".").replace(" ", "_").replace("/", "_").replace(",", "")
        model = build(job.arm, size, corpus.symbols, job.seed).to(self.device)
        steps = max(1, int(size.tokens * (TUNING if job.tuning else 1.0)) // (size.rows * size.length))
        optimizer = muon_and_adamw(model, job.rate, OF_ADAMW * job.rate)
        rates, narrow = (
            [group["lr"] for group in optimizer.param_groups],
            narrowed(model, job.arm, size, corpus.symbols),
        )
        file, done, seconds, saved = self.out / f"{name}.pt", 0, 0.0, time.monotonic()
        if file.is_file():
            state = torch.load(file, map_location=self.device, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            done, seconds = state["step"], state["seconds"]
        for step in range(done, steps):
            over = time.monotonic() > self.deadline
            if over or time.monotonic() > saved + SAVE_SECONDS:
                parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                with complete(file) as part:
                    torch.save({**parts, "step": step, "seconds": seconds}, part)
                saved = time.monotonic()
            if over:
                return None
            began = self.clock()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                warm = min(1.0, (step + 1) / (WARMUP * steps))
                group["lr"] = rate * warm * 0.5 * (1.0 + math.cos(math.pi * step / steps))
            loss = self._loss(narrow if step < START * steps else model, corpus.batch(size, job.seed, step))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            wait_for(self.device)
            seconds += self.clock() - began
        began, numbers = self.clock(), evaluate(model, corpus, size, self.device)
        file.unlink(missing_ok=True)
        line = {"key": job.key, "seconds": round(seconds + self.clock() - began), "commit": commit()}
        if not math.isfinite(numbers["all"]):
            return {**line, FAILED: "the loss is not finite"}
        inner = sum(p.numel() for part, p in model.named_parameters() if not part.startswith("embed."))
        layers, share = parse(job.arm.windows, size.heads, max(1, size.length // 1024)), job.arm.share(size.heads)
        for name, length in (("keys", size.length), ("keys at 8192", 8192)):
            numbers[name] = round(keys_a_head(layers, length) * share, 1)
        return {**line, NUMBERS: {**numbers, "parameters": inner, "updates": steps, "rate": job.rate}}

    def _loss(self, model: Vanilla | Retina, rows: Tensor) -> Tensor:
        tokens = rows.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return model.loss(tokens[:, :-1], tokens[:, 1:])


def commit() -> str:
    """Of the checkout, as git names it; + where it has changes."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def jobs(arms: Sequence[Arm], corpus: str, records: Records, seeds: int | None) -> Iterator[Job]:
    """What is to be run, each decided by what the records say then: of each arm its rates, then its seeds."""

    def known(job: Job) -> dict[str, Any]:
        return records.by_key().get(job.key, {}).get(NUMBERS, {})

    for arm in arms:
        search, tried = [Job(corpus, arm, 1, rate, True) for rate in RATES], [1, 2]
        yield from (search[place] for place in tried)
        while losses := {place: known(search[place])["all"] for place in tried if known(search[place])}:
            best = min(losses, key=lambda place: losses[place])
            further = best + 1 if best == max(tried) else best - 1 if best == min(tried) else best
            if further in tried or not 0 <= further < len(RATES):
                yield from (Job(corpus, arm, seed, RATES[best], False) for seed in range(1, (seeds or arm.seeds) + 1))
                break
            tried.append(further)
            yield search[further]


def runs_of(records: Mapping[str, Record], corpus: str, kind: str = "seed") -> dict[str, list[dict[str, Any]]]:
    """By name of an arm that has run, the best first: the numbers of its seeds, or of its searches ("rate").

    A seed that ran at several rates counts at the last.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for key, line in records.items():
        of, name, run = key.split(" | ")
        if of == corpus and run.startswith(f"{kind} ") and NUMBERS in line:
            found.setdefault(name, {})[" ".join(run.split()[:2])] = line[NUMBERS]
    runs = {name: [*of_runs.values()] for name, of_runs in found.items()}
    return dict(sorted(runs.items(), key=lambda item: item[1][0]["all"]))


def page(tables: Sequence[tuple[Mapping[str, Any], Mapping[str, Record]]], figure: str) -> str:
    """Tables, each a machine with its records, as Markdown with the file of their figure: what has run and what not."""
    about = (
        "Models that differ in their windows, in how many heads have keys and values of their own, or in their short "
        "convolution, and are trained alike. Where a row says nothing else, they have rotary positions, QK norm with "
        "a learned temperature a head, and before attention a convolution that adds the three tokens before each "
        f"(`--short-conv 3`); with one key/value head, the FFN is widened to {ONE_KEY_HEAD['ffn_dim']} columns, so "
        "that all have as many parameters. Muon's rate is the best of a doubling search on a tenth of the tokens, "
        f"AdamW's is {OF_ADAMW:g} times Muon's. Losses are in nats a token, seeds side by side: *all* over whole rows "
        "of the validation text, *late* over their second halves, *a tenth* at the end of the best search. *Keys* are "
        "what a head of queries remembers, on average, at the end of a row and after 8,192 tokens; parameters leave "
        "out embeddings."
    )
    lines = ["# Windows at equal cache", "", *wrapped(about), "", f"![Losses of the best arms]({figure})"]
    for machine, records in joined(tables):
        for corpus in dict.fromkeys(key.partition(" | ")[0] for key in records):
            lines += _table(machine, records, corpus)
    return "\n".join(lines) + "\n"


def joined(
    tables: Sequence[tuple[Mapping[str, Any], Mapping[str, Record]]],
) -> Sequence[tuple[Mapping[str, Any], Mapping[str, Record]]]:
    """The records of all tables of one size, training included, as one table, of all their machines."""
    by_size: dict[tuple[Any, ...], list[tuple[Mapping[str, Any], Mapping[str, Record]]]] = {}
    for machine, records in tables:
        by_size.setdefault(tuple(machine["size"]), []).append((machine, records))
    found = []
    for parts in by_size.values():
        every = {of: " and ".join(dict.fromkeys(machine[of] for machine, _ in parts)) for of in ("device", "torch")}
        found.append(({**parts[0][0], **every}, {key: line for _, records in parts for key, line in records.items()}))
    return found


def _table(machine: Mapping[str, Any], records: Mapping[str, Record], corpus: str) -> list[str]:
    """The section of a corpus."""
    size = Size(*machine["size"])
    runs, searches, rows = runs_of(records, corpus), runs_of(records, corpus, "rate"), []
    hours = sum(line["seconds"] for key, line in records.items() if key.startswith(f"{corpus} | ")) / 3600.0
    about = (
        f"{size.layers} layers of {size.heads} heads, {size.dim} wide, {size.tokens / 1e6:g} million tokens in rows of "
        f"{size.length:,}, {size.rows} an update; {size.held_out} rows of the validation text. {hours:.1f} hours on "
        f"{machine['device']}, torch {machine['torch']}."
    )
    lines = ["", f"## {corpus.capitalize()}, {size.tokens / 1e6:g} million tokens", "", *wrapped(about), ""]
    lines.append(
        f"    python -m benchmarks.windows CORPUS --out FOLDER --tokens {size.tokens / 1e6:g}e6 --report PAGE.md"
    )
    lines += ["", "These are tiny shapes: the numbers mean nothing."] if machine["quick"] else []
    arms = {arm.name: arm for arm in ARMS}
    windows = OLDER | {name: arm.windows for name, arm in arms.items()}
    for name, of_seeds in runs.items():
        first, losses = of_seeds[0], [", ".join(f"{run[n]:.3f}" for run in of_seeds) for n in ("all", "late")]
        searched = sorted(run["rate"] for run in searches.get(name, ()))
        rate = f"{first['rate']:g}" + (" (the highest)" if searched and first["rate"] == searched[-1] else "")
        start = f"{min(run['all'] for run in searches[name]):.3f}" if name in searches else ""
        keys = [f"{first[n]:,.0f}" if n in first else "" for n in ("keys", "keys at 8192")]
        shown, inner = f"`{windows[name]}`".replace("|", "\\|"), f"{first['parameters'] / 1e6:.2f} M"
        rows.append([name, shown, *keys, start, *losses, rate, inner])
    header = ["arm", "windows", "keys", "at 8,192", "a tenth", "all", "late", "rate", "parameters"]
    lines += ["", *table_of(header, rows)]
    if older := [name for name in runs if name in OLDER]:
        lines += ["", *wrapped(f"Of older code, which the command does not build any more: {'; '.join(older)}.")]
    at_first = sorted(searches.keys() & runs.keys(), key=lambda name: min(run["all"] for run in searches[name]))
    lines += ["", *wrapped(f"After a tenth of the tokens, the order was: {'; '.join(at_first)}.")]
    for title, by in (
        ("distance to the last occurrence of the same pair", "distance"),
        ("position", "position"),
    ):
        every = COLUMNS if by == "distance" else [f"to {place}" for place in POSITIONS]
        columns = [column for column in every if all(column in of_seeds[0][by] for of_seeds in runs.values())]
        rows = [[name, *(f"{of_seeds[0][by][c]:.3f}" for c in columns)] for name, of_seeds in runs.items()]
        if by == "distance" and runs:
            rows.append(["share of targets", *(f"{next(iter(runs.values()))[0]['share'][c]:.1%}" for c in columns)])
        lines += ["", f"Losses of seed 1 by {title}:", "", *table_of(["arm", *columns], rows)]
    if (missing := [name for name in arms if name not in runs]) and not runs.keys() & OLDER.keys():
        lines += ["", *wrapped(f"Not run: {'; '.join(missing)}.")]
    return lines


def recorded(folder: Path) -> tuple[dict[str, Any], dict[str, Record]]:
    """The machine and the records of a folder; UsageError where there are none."""
    file = folder / "records.jsonl"
    if not file.is_file():
        raise UsageError(f"--out and --also must name folders with a records.jsonl: got {folder}")
    head, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return head["machine"], {line["key"]: line for line in lines}


def draw(records: Mapping[str, Record], figure: Any) -> None:
    """Loss by position, and by distance back, of the eight best arms on the first corpus."""
    runs = dict([*runs_of(records, next(iter(records), "").partition(" | ")[0]).items()][:8])
    left, right = figure.subplots(1, 2)
    positions = {n: [(int(e.removeprefix("to ")), x) for e, x in r[0]["position"].items()] for n, r in runs.items()}
    plot_panel(left, positions, "position", "loss, nats", legend=False)
    powers_of_two(left)
    plot_panel(right, {n: list(r[0]["distance"].items()) for n, r in runs.items()}, "tokens back to the same pair", "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is left; 0 when nothing is, 3 when the time is over before."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.windows", description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "corpora",
        nargs="*",
        type=Path,
        metavar="CORPUS",
        help="folder that fairseq-ms prepare made (none: report alone)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of records.jsonl and checkpoints")
    names = [arm.name for arm in ARMS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="ARM", default=names, help="; ".join(names))
    parser.add_argument("--seeds", type=int, help="of every arm (default: its own number)")
    parser.add_argument("--size", choices=list(SIZES), default="cpu", help="of all models (default: cpu)")
    parser.add_argument("--tokens", type=float, metavar="N", help="of training (default: that of --size)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU (default: 1)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many (default: never)")
    parser.add_argument("--report", metavar="PAGE.md", help="write a page of the records, and PAGE.png beside it")
    also = "folders whose records come after those of --out on the page"
    parser.add_argument("--also", nargs="+", type=Path, default=[], metavar="FOLDER", help=also)
    args = parser.parse_args(arguments)
    # fairseq lets everybody say everything.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        return _run(args)
    except UsageError as error:
        parser.error(str(error))


def _run(args: argparse.Namespace) -> int:
    check_outputs(args)
    over = train(args) if args.corpora else False
    if args.report:
        tables = [recorded(folder) for folder in (args.out, *args.also)]
        write_text(args.report, page(tables, f"{Path(args.report).stem}.png"))
        _, records = joined(tables)[0]
        write_png(str(Path(args.report).with_suffix(".png")), lambda figure: draw(records, figure), width=11.0)
    if over:
        print("the time is over: the same command goes on from here", file=sys.stderr)
    return 3 if over else 0


def train(args: argparse.Namespace) -> bool:
    """Run what is left of the corpora; whether the time is over before."""
    size, corpora = SIZES[args.size], [Corpus(folder) for folder in args.corpora]
    size = size._replace(tokens=args.tokens or size.tokens)
    args.out.mkdir(parents=True, exist_ok=True)
    found = facts(Options(args.device, args.size == "quick", threads=args.threads))
    # Losses do not depend on the rest: a run that was begun on one machine may go on on another of its kind.
    machine = {**{name: found[name] for name in ("device", "torch", "quick")}, "size": list(size)}
    records = Records(args.out / "records.jsonl", machine)
    trainer = Trainer(size, args.out, torch.device(args.device), time.monotonic() + 60.0 * args.minutes)
    before, over = signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "deadline", 0.0)), False
    for corpus in corpora:
        for job in jobs([arm for arm in ARMS if arm.name in args.only], corpus.name, records, args.seeds):
            if over or job.key in records.by_key():
                continue
            line = trainer.run(job, corpus)
            over = line is None
            if line is not None:
                records.append(line)
                print(line["key"], line.get(FAILED) or line[NUMBERS]["all"], line["seconds"], "s", flush=True)
    signal.signal(signal.SIGTERM, before)
    return over


if __name__ == "__main__":
    raise SystemExit(main())
