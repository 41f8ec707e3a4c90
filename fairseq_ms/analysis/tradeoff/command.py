"""`fairseq-ms tradeoff`: what perplexity costs in memory or time, over a folder of runs (Figure 3)."""

from __future__ import annotations

import argparse

from fairseq_ms.analysis import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Runs, data, the cost to draw and outputs."""
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="folder below which the runs' save directories lie")
    parser.add_argument("--checkpoint", default="checkpoint_best.pt", help="its file (default: checkpoint_best.pt)")
    parser.add_argument("--data", help="folder that fairseq-preprocess wrote (default: the one trained on)")
    parser.add_argument("--gen-subset", default="test", help="split of the data (default: test)")
    parser.add_argument("--limit", type=arguments.positive, metavar="N", help="score only the first N tokens")
    parser.add_argument(
        "--batch-size", type=arguments.positive, default=1, metavar="N", help="samples of a training step (default: 1)"
    )
    parser.add_argument("--cost", choices=("memory", "time"), default="memory", help="of the figure (default: memory)")
    parser.add_argument(
        "--max-tokens", type=arguments.positive, default=8192, metavar="N", help="tokens in a batch (default: 8192)"
    )
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU although there is a CUDA device")
    arguments.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print one row a run."""
    from fairseq_ms.analysis import checkpoints, report
    from fairseq_ms.analysis.tradeoff import runs

    report.check_outputs(args.json, args.png)
    arguments.quieten()
    loaded: list[checkpoints.Checkpoint] = []
    results = []
    for label, path in runs.find_runs(args.runs, args.checkpoint):
        checkpoint = checkpoints.load(str(path), args.data, args.cpu)
        checkpoint.label = label
        checkpoints.require_one_dictionary([*loaded[:1], checkpoint], args.command)
        loaded.append(checkpoint)
        results.append(runs.measure(checkpoint, args.gen_subset, args.limit, args.batch_size, args.max_tokens))
    rows = [
        [
            result["label"],
            result["arch"],
            result["layers"],
            result["perplexity"],
            result["parameters"] / 1e6,
            runs.memory_of(result) / 1e9,
            result["kept_bytes_per_target"] / 1e3,
            result["seconds_per_target"] * 1e6,
        ]
        for result in results
    ]
    header = ["run", "arch", "layers", "perplexity", "M parameters", "GB", "kB/target kept", "us/target"]
    print(f"training step of {args.batch_size} sample(s); perplexity on {args.gen_subset}")
    print(report.format_table(header, rows))
    print(f"GB: {runs.measure_of(results)}")
    arguments.write_results(args, loaded, results)
    if args.png:
        report.write_png(args.png, lambda figure: runs.draw(figure, results, args.cost))
    return 0
