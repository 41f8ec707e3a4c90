"""`fairseq-ms recall`: how far back a model can recall a symbol, beside how far it can see."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fairseq_ms.analysis import arguments, comparison, report
from fairseq_ms.analysis.flags import add_counts

if TYPE_CHECKING:
    from fairseq_ms.analysis.recall.accuracy import Bin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, window, bins and outputs."""
    arguments.add_checkpoints(parser)
    arguments.add_window(parser)
    add_counts(parser, ("--bins", 16, "ranges of distances"), ("--limit", None, "read only the first N tokens"))
    parser.add_argument("--seed", type=int, default=1, help="of the guesses (default: 1)")
    arguments.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print accuracy by distance, and each model's context by formula and by recall."""
    from dataclasses import asdict

    from fairseq_ms.analysis import scoring
    from fairseq_ms.analysis.recall import accuracy, questions

    loaded = comparison.load(args)
    arguments.check_window_is_used(args, loaded)
    asked, exercises = questions.load_questions(loaded[0], args.gen_subset, args.limit)
    oracle = accuracy.by_distance(asked.distances, accuracy.oracle_answers(asked), args.bins)
    guesses = accuracy.guessed_answers(asked, exercises, args.seed)
    columns = {"oracle": oracle, "guessing": accuracy.by_distance(asked.distances, guesses, args.bins)}
    results = []
    for checkpoint in loaded:
        window, context = checkpoint.segment, 0
        if not checkpoint.streaming:
            window, context = scoring.check_window(checkpoint, args.tokens_per_sample, args.context_window)
        right = accuracy.right_answers(checkpoint, asked, exercises, window, context, args.max_tokens)
        seen = accuracy.reach(checkpoint, window, context)
        results.append(accuracy.summarise(checkpoint.label, seen, asked, right, args.bins))
    found = {
        "chance": asked.chance,
        **{name: [asdict(point) for point in points] for name, points in columns.items()},
        "models": [asdict(result) for result in results],
    }
    curves = [*columns.values(), *(result.bins for result in results)]
    rows: list[list[object]] = [
        [f"{points[0].first}-{points[0].last}", points[0].asked, *(round(point.accuracy, 3) for point in points)]
        for points in zip(*curves)
    ]
    rows.append(["all", len(asked.answers), *map(_mean, curves)])
    print(f"accuracy of recall by distance in tokens; chance is {asked.chance:.3f}")
    print(report.format_table(["distance", "asked", *columns, *(result.label for result in results)], rows))
    print("\ncontext in tokens by formula, what is recalled of it, and accuracy beyond its maximum")
    rows = []
    for result in results:
        beyond = round(result.beyond.accuracy, 3) if result.beyond else None
        rows.append([result.label, *vars(result.context).values(), round(result.recalled, 1), beyond])
    print(report.format_table(["", "minimum", "maximum", "average", "recalled", "beyond"], rows))
    for result in results:
        if result.leaks:
            print(f"{result.label} answers what it cannot see: the future leaks, or the formula is wrong")
    comparison.write(args, loaded, found, lambda figure: accuracy.draw(figure, results, asked.chance))
    return 0


def _mean(points: list[Bin]) -> float:
    asked = sum(point.asked for point in points)
    return round(sum(point.accuracy * point.asked for point in points) / asked, 3)
