"""What the demo's table says about a trained model."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from fairseq import checkpoint_utils

from commands import ROOT, program, run
from fairseq_ms.analysis.training_step import step_bytes
from models import CONTEXT


@dataclass(frozen=True)
class Evaluation:
    """One row of the table; perplexities are those of the held-out split."""

    model: str
    parameters: int
    subword_perplexity: float
    word_perplexity: float
    bits_per_byte: float
    saved_bytes_per_token: float


def evaluate(name: str, data: Path, folder: Path, counts: dict[str, int], split: str) -> Evaluation:
    """Evaluate the best checkpoint with windows of ``CONTEXT`` tokens and a stride of half of it.

    ``counts`` holds the split's targets, words and bytes, for perplexities by another unit than subwords.
    """
    checkpoint = folder / "checkpoint_best.pt"
    printed = run(
        [
            *program("fairseq-eval-lm"),
            str(data),
            *("--user-dir", "fairseq_ms", "--path", str(checkpoint), "--cpu", "--gen-subset", split),
            *("--tokens-per-sample", str(CONTEXT), "--context-window", str(CONTEXT // 2)),
            *("--batch-size", "16", "--num-workers", "0", "--no-progress-bar"),
        ],
        folder / f"eval-{split}.log",
    )
    scored = int(found(r"Evaluated ([\d,]+) tokens", printed).replace(",", ""))
    assert scored == counts["targets"], f"{scored} targets were scored, and the split has {counts['targets']}"
    bits = float(found(r"Loss \(base 2\): ([\d.]+)", printed))
    models, _ = checkpoint_utils.load_model_ensemble([str(checkpoint)], arg_overrides={"data": str(data)})
    with torch.random.fork_rng():
        saved = step_bytes(models[0], batch=4, tokens=CONTEXT) / (4 * CONTEXT)
    return Evaluation(
        model=name,
        parameters=sum(parameter.numel() for parameter in models[0].parameters()),
        subword_perplexity=2**bits,
        # An end of line counts as a word, as it does for WikiText.
        word_perplexity=2 ** (bits * scored / counts["words_with_eol"]),
        bits_per_byte=bits * scored / counts["bytes"],
        saved_bytes_per_token=saved,
    )


def found(pattern: str, printed: str) -> str:
    """The group of a pattern that a command must have printed."""
    match = re.search(pattern, printed)
    assert match is not None, printed
    return match[1]


def table(rows: list[Evaluation], split: str) -> str:
    """The rows as text."""
    lines = [
        f"{split} split, windows of {CONTEXT} tokens, stride {CONTEXT // 2}",
        f"{'':12} {'parameters':>11} {'perplexity':>18} {'bits per':>9} {'saved bytes':>12}",
        f"{'':12} {'':>11} {'subword':>8} {'word':>9} {'byte':>9} {'a token':>12}",
    ]
    for row in rows:
        lines.append(
            f"{row.model:12} {row.parameters:11,} {row.subword_perplexity:8.2f} {row.word_perplexity:9.2f} "
            f"{row.bits_per_byte:9.3f} {row.saved_bytes_per_token:12,.0f}"
        )
    return "\n".join(lines)


def shown(path: Path) -> str:
    """A path as the user would type it from the project's folder."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
