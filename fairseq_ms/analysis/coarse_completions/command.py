"""`fairseq-ms coarse-completions`: the words that coarse language models expect after a context (Table 7)."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from fairseq_ms.analysis import arguments
from fairseq_ms.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which checkpoints, which contexts, how many words."""
    parser.add_argument(
        "checkpoints",
        nargs="+",
        metavar="[LABEL=]CHECKPOINT",
        help="file that fairseq-train wrote with --arch coarse_lm (default of the label: its folder's name)",
    )
    contexts = parser.add_mutually_exclusive_group(required=True)
    arguments.add_flag(
        contexts,
        "--text",
        "--context",
        action="append",
        metavar="TEXT",
        help="what was read so far, tokenised and segmented as the training text; may be given several times",
    )
    contexts.add_argument("--input", metavar="FILE", help="read the contexts from a file, one a line; - is stdin")
    parser.add_argument(
        "--top", type=arguments.positive, metavar="N", help="words to print (default: as many as the scale has tokens)"
    )
    parser.add_argument("--data", help="folder that fairseq-preprocess wrote (default: the one trained on)")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU although there is a CUDA device")
    arguments.add_outputs(parser, figure=False)


def run(args: argparse.Namespace) -> int:
    """Print a table of completions for every context, coarsest model last, and write the JSON file."""
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.coarse_completions.completions import complete, encode, scale_of

    contexts = args.text if args.text is not None else read_lines(args.input)
    report.check_outputs(args.json, None)
    loaded = sorted(arguments.load_checkpoints(args), key=scale_of)
    results = []
    for context in contexts:
        print(f"Context: {context}")
        completions = [complete(checkpoint, encode(checkpoint, context), args.top) for checkpoint in loaded]
        rows = [[found.label, f"{found.scale}x", "  ".join(found.words)] for found in completions]
        print(report.format_table(["checkpoint", "scale", "completion"], rows), end="\n\n")
        results.append({"context": context, "completions": [asdict(found) for found in completions]})
    arguments.write_results(args, loaded, results)
    return 0


def read_lines(path: str) -> list[str]:
    """The lines of a file that are not blank; UsageError when there are none."""
    if path != "-" and not Path(path).is_file():
        raise UsageError(f"--input must be a file: {path} does not exist")
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--input must be text in UTF-8: got {path} ({error})") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"--input must have at least one line that is not blank: got {path}")
    return lines
