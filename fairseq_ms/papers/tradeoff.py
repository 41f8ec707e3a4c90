"""Perplexity against memory or time of training, over a folder of runs.

Multi-scale Transformer LMs, Section 5.1, Figure 3.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import comparison, report
from fairseq_ms.tools.arguments import add_choice, add_counts, add_cpu, add_data, add_outputs, place, register

if TYPE_CHECKING:
    from fairseq.dataclass import FairseqDataclass

    from fairseq_ms.tools.checkpoints import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=place, metavar="RUNS", help="folder below which runs' save directories lie"
    )
    parser.add_argument(
        "--checkpoint", type=place, default="checkpoint_best.pt", help="its file (default: checkpoint_best.pt)"
    )
    add_data(parser, "test")
    add_counts(
        parser,
        ("--limit", None, "score only the first N tokens"),
        ("--batch-size", 1, "samples of a training step"),
        ("--max-tokens", 8192, "tokens in a batch"),
    )
    add_choice(parser, "--cost", ("memory", "time"), "of the figure")
    add_cpu(parser)
    add_outputs(parser)


def run(args: argparse.Namespace) -> None:
    register()
    from fairseq_ms.tools import checkpoints

    loaded: list[Checkpoint] = []
    results = []
    for label, path in find_runs(args.runs, args.checkpoint):
        checkpoint = checkpoints.load(str(path), args.data, args.cpu)
        checkpoint.label = label
        checkpoints.require_one_dictionary([*loaded[:1], checkpoint], args.command)
        loaded.append(checkpoint)
        results.append(measure(checkpoint, args.gen_subset, args.limit, args.batch_size, args.max_tokens))
    rows = []
    for run in results:
        costs = memory_of(run)[0], run["kept_bytes_per_target"] / 1e3, run["seconds_per_target"] * 1e6
        rows.append([run["label"], run["arch"], run["layers"], run["perplexity"], run["parameters"] / 1e6, *costs])
    header = ["run", "arch", "layers", "perplexity", "M parameters", "GB", "kB/target kept", "us/target"]
    print(f"training step of {args.batch_size} sample(s); perplexity on {args.gen_subset}")
    print(report.format_table(header, rows))
    print(f"GB: {memory_of(results[0])[1]}")
    comparison.write(args, loaded, results, lambda figure: draw(figure, results, args.cost))


Run = dict[str, Any]
"""What ``measure`` finds of a run, by name."""


def find_runs(folders: Sequence[str], file: str) -> list[tuple[str, Path]]:
    """(label, checkpoint) of every run below the folders; UsageError when a folder holds none."""
    found = []
    for folder in folders:
        paths = sorted(Path(folder).glob(f"**/{file}"))
        if not paths:
            raise UsageError(f"RUNS must be a folder with runs: no {file} lies below {folder}")
        found += [(str(path.parent.relative_to(folder)), path) for path in paths]
    return [(Path(path).resolve().parent.name if label == "." else label, path) for label, path in found]


def layers_of(cfg: FairseqDataclass) -> str:
    """How many layers a model has, as the figure writes it beside a point: coarsest scale first."""
    from fairseq_ms.lm.scales import layer_scales

    text = getattr(cfg, "scale_layers", None)
    if text is None:
        return str(getattr(cfg, "decoder_layers", ""))
    return ",".join(str(scale.layers) for scale in layer_scales(text)[::-1])


def measure(checkpoint: Checkpoint, split: str, limit: int | None, batch: int, max_tokens: int) -> Run:
    """Perplexity of a run on a split, and what a training step of it costs, in all and by scored target.

    Bytes are those kept for backward, and these with weights, gradients and Adam's state. On a GPU there is the paper's
    own measure, too: the peak of a step in mixed precision.
    """
    from fairseq_ms.tools import scoring, training_step, untrained

    texts = checkpoint.documents(split, limit)
    nll = scoring.score_documents(checkpoint, texts, max_tokens=max_tokens).mean()
    model, tokens = checkpoint.model, checkpoint.segment
    kept = training_step.step_bytes(model, batch, tokens)
    total = kept + sum(training_step.weight_bytes(model).values())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = training_step.seconds(model, batch, tokens)
    # Last, since the model is in half precision then, and other runs' peaks are not to have it in them.
    peak = training_step.cuda_peak(model.half(), batch, tokens)
    model.eval().cpu()
    return {
        "label": checkpoint.label,
        "arch": untrained.architecture(checkpoint.cfg.model),
        "layers": layers_of(checkpoint.cfg.model),
        "nll": float(nll),
        "perplexity": math.exp(nll),
        "parameters": parameters,
        "kept_bytes": kept,
        "total_bytes": total,
        "max_memory_allocated": peak,
        "kept_bytes_per_target": kept / (batch * tokens),
        "seconds_per_target": seconds / (batch * tokens),
        "seconds": seconds,
    }


def memory_of(run: Run) -> tuple[float, str]:
    """GB of a training step, and what they are: the GPU's peak, or where there is none what is computed."""
    if run["max_memory_allocated"] is None:
        return run["total_bytes"] / 1e9, "kept for backward, weights, gradients and Adam"
    return run["max_memory_allocated"] / 1e9, "max_memory_allocated of a step in mixed precision"


def draw(figure: report.Figure, runs: Sequence[Run], cost: str) -> None:
    """One line an architecture, its runs in order of cost, the number of layers beside each point."""
    axes = figure.add_subplot()
    label = f"{memory_of(runs[0])[1]} (GB)" if cost == "memory" else "forward and backward of a training step (s)"

    def cost_of(run: Run) -> float:
        return memory_of(run)[0] if cost == "memory" else run["seconds"]

    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in sorted(runs, key=cost_of):
        point = cost_of(run), run["perplexity"]
        lines[run["arch"]].append(point)
        axes.annotate(run["layers"], point, textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.margins(0.12)
    report.plot_panel(axes, lines, label, "perplexity")
