"""`fairseq-ms recall`: how far back a model can recall a symbol, beside how far it can see."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fairseq_ms.analysis import arguments

if TYPE_CHECKING:
    from fairseq_ms.analysis.recall.accuracy import Bin, Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, window, bins and outputs."""
    arguments.add_checkpoints(parser)
    arguments.add_window(parser)
    parser.add_argument(
        "--bins", type=arguments.positive, default=16, metavar="N", help="ranges of distances (default: 16)"
    )
    parser.add_argument("--limit", type=arguments.positive, metavar="N", help="read only the first N tokens")
    parser.add_argument("--seed", type=int, default=1, help="of the guesses (default: 1)")
    arguments.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print accuracy by distance, and each model's context by formula and by recall."""
    from dataclasses import asdict

    from fairseq_ms.analysis import checkpoints, report, scoring
    from fairseq_ms.analysis.recall import accuracy, questions
    from fairseq_ms.analysis.recall.reach import reach

    report.check_outputs(args.json, args.png)
    loaded = arguments.load_checkpoints(args)
    arguments.check_window_is_used(args, loaded)
    checkpoints.require_one_dictionary(loaded, args.command)
    asked, exercises = questions.load_questions(loaded[0], args.gen_subset, args.limit)
    results = []
    for checkpoint in loaded:
        window, context = checkpoint.segment, 0
        if not checkpoint.streaming:
            window, context = scoring.check_window(checkpoint, args.tokens_per_sample, args.context_window)
        right = accuracy.right_answers(checkpoint, asked, exercises, window, context, args.max_tokens)
        seen = reach(checkpoint, window, context)
        results.append(accuracy.summarise(checkpoint.label, seen, asked, right, args.bins))
    oracle = accuracy.by_distance(asked.distances, accuracy.oracle_answers(asked), args.bins)
    guesses = accuracy.guessed_answers(asked, exercises, args.seed)
    guessed = accuracy.by_distance(asked.distances, guesses, args.bins)
    rows = [
        [f"{points[0].first}-{points[0].last}", points[0].asked, *(round(point.accuracy, 3) for point in points)]
        for points in zip(oracle, guessed, *(result.bins for result in results))
    ]
    total = [oracle, guessed, *(result.bins for result in results)]
    rows.append(["all", len(asked.answers), *(_mean(points) for points in total)])
    labels = [result.label for result in results]
    print(f"accuracy of recall by distance in tokens; chance is {asked.chance:.3f}")
    print(report.format_table(["distance", "asked", "oracle", "guessing", *labels], rows))
    print("\ncontext in tokens by formula, what is recalled of it, and accuracy beyond its maximum")
    header = ["", "minimum", "maximum", "average", "recalled", "beyond"]
    print(report.format_table(header, [_summary(result) for result in results]))
    for result in results:
        if result.leaks:
            print(f"{result.label} answers what it cannot see: the future leaks, or the formula is wrong")
    found = {
        "chance": asked.chance,
        "oracle": [asdict(point) for point in oracle],
        "guessing": [asdict(point) for point in guessed],
        "models": [asdict(result) for result in results],
    }
    arguments.write_results(args, loaded, found)
    if args.png:
        report.write_png(args.png, lambda figure: accuracy.draw(figure, results, asked.chance))
    return 0


def _mean(points: list[Bin]) -> float:
    asked = sum(point.asked for point in points)
    return round(sum(point.accuracy * point.asked for point in points) / asked, 3)


def _summary(result: Result) -> list[object]:
    """A model's row of the second table."""
    context = result.context
    beyond = round(result.beyond.accuracy, 3) if result.beyond else None
    return [result.label, context.minimum, context.maximum, context.average, round(result.recalled, 1), beyond]
