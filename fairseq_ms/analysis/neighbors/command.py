"""`fairseq-ms neighbors`: what a scale's representation finds alike (Table 6)."""

from __future__ import annotations

import argparse
import textwrap

from fairseq_ms.analysis import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoint, corpus, queries and output."""
    arguments.add_checkpoints(parser, split="train")
    arguments.add_flag(
        parser,
        "--tokens-per-sample",
        "--segment",
        type=arguments.positive,
        metavar="N",
        help="tokens of a segment (default: 128, or the model's)",
    )
    parser.add_argument("--limit", type=arguments.positive, metavar="N", help="search only the first N segments")
    parser.add_argument(
        "--scales", type=arguments.positive_list, metavar="N,N,...", help="scales, such as 4,16,64 (default: all)"
    )
    parser.add_argument("--text", action="append", help="query: a text tokenised like the corpus (repeatable)")
    parser.add_argument(
        "--position",
        type=int,
        action="append",
        metavar="N",
        help="query: the segment that holds token N of the split (repeatable; default: the middle of the corpus)",
    )
    arguments.add_flag(
        parser, "--top", "--count", type=arguments.positive, default=3, metavar="N", help="neighbours (default: 3)"
    )
    parser.add_argument("--remove-bpe", metavar="SYMBOL", nargs="?", const="@@ ", help=arguments.REMOVE_BPE)
    arguments.add_outputs(parser, figure=False)


def run(args: argparse.Namespace) -> int:
    """Print the queries, each followed by its nearest segments at every scale."""
    import torch

    from fairseq_ms.analysis import checkpoints, report
    from fairseq_ms.analysis.neighbors import search
    from fairseq_ms.errors import UsageError

    report.check_outputs(args.json, None)
    results = []
    loaded = arguments.load_checkpoints(args)
    for checkpoint in loaded:
        scales = search.scales_of(checkpoint)
        if args.scales:
            scales = args.scales
        length = args.tokens_per_sample or min(128, checkpoint.longest or 128)
        search.check_segment(checkpoint, length)
        segments = search.cut_segments(
            torch.cat(checkpoints.documents(checkpoint, args.gen_subset)), length, args.limit
        )
        corpus = search.embed(checkpoint, segments, scales, args.max_tokens)
        positions = args.position or ([] if args.text else [len(segments) // 2 * length])
        queries = []
        for position in positions:
            segment = position // length
            if not 0 <= segment < len(segments):
                raise UsageError(
                    f"--position must lie in the {len(segments)} segments of {length} tokens: got {position}"
                )
            vectors = {scale: corpus[scale][segment] for scale in scales}
            queries.append((search.as_text(checkpoint, segments[segment], args.remove_bpe), vectors, segment))
        for text in args.text or []:
            tokens, unknown = search.encode_text(checkpoint, text)
            if unknown:
                print(f"{unknown} of the {tokens.numel()} tokens of --text are unknown to {checkpoint.label}")
            embedded = search.embed(checkpoint, tokens, scales)
            queries.append((text, {scale: embedded[scale][0] for scale in scales}, None))
        for text, vectors, own in queries:
            found = {
                f"{scale}x": search.describe(
                    checkpoint,
                    segments,
                    search.nearest(corpus[scale], vectors[scale], args.top, own),
                    args.remove_bpe,
                )
                for scale in scales
            }
            results.append({"label": checkpoint.label, "query": text, "segment": own, "neighbors": found})
    for result in results:
        print(_format(result))
    arguments.write_results(args, loaded, results)
    return 0


def _format(result: dict) -> str:
    """A query and its neighbours, wrapped."""

    def wrapped(head: str, text: str) -> str:
        return textwrap.fill(text, 110, initial_indent=head, subsequent_indent="    ")

    lines = [wrapped(f"{result['label']}, query: ", result["query"])]
    for scale, found in result["neighbors"].items():
        lines.append(f"  nearest at {scale}")
        lines += [wrapped(f"    {n['cosine']:.4f}  #{n['segment']}: ", n["text"]) for n in found]
    return "\n".join(lines)
