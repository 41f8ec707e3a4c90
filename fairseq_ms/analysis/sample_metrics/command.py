"""`fairseq-ms sample-metrics`: what a model's samples are like (Table 5)."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairseq_ms.analysis import arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from fairseq_ms.analysis.checkpoints import Checkpoint

    # Perplexity of samples behind their contexts, each a list of words.
    Judge = Callable[[list[list[str]], list[list[str]]], float]


@dataclass(frozen=True)
class Result:
    """A checkpoint's numbers by the table's header, and a context with its completions for each prompt."""

    label: str
    numbers: dict[str, float]
    samples: list[dict[str, object]]

    def as_dict(self) -> dict[str, object]:
        """As JSON files have it."""
        return {"label": self.label, **self.numbers, "samples": self.samples}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, sampling, judges and output; the defaults are the paper's."""
    arguments.add_checkpoints(parser)
    parser.add_argument(
        "--prompts", type=arguments.positive, default=100, metavar="N", help="contexts from the split (default: 100)"
    )
    arguments.add_flag(
        parser,
        "--prefix-size",
        "--context",
        type=arguments.positive,
        default=64,
        metavar="N",
        help="tokens of a context (default: 64)",
    )
    parser.add_argument(
        "--length", type=arguments.positive, default=256, metavar="N", help="tokens of a sample (default: 256)"
    )
    parser.add_argument(
        "--completions", type=arguments.positive, default=3, metavar="N", help="samples a prompt (default: 3)"
    )
    parser.add_argument(
        "--sampling-topk",
        type=arguments.positive,
        default=10,
        metavar="K",
        help="draw from the K likeliest tokens (default: 10)",
    )
    parser.add_argument("--temperature", type=float, default=0.7, help="divides the logits (default: 0.7)")
    parser.add_argument(
        "--batch-size", type=arguments.positive, default=8, metavar="N", help="prompts in a batch (default: 8)"
    )
    parser.add_argument("--timed", type=arguments.positive, default=5, metavar="N", help="prompts timed (default: 5)")
    parser.add_argument("--ngram-lm", metavar="FILE", help="kenlm model of the tokenised text, ARPA or binary")
    parser.add_argument(
        "--estimate-ngram-lm", action="store_true", help="estimate a 4-gram of the training split with kenlm's lmplz"
    )
    parser.add_argument(
        "--hf-lm",
        metavar="FOLDER",
        help="local folder of GPT-2 or another causal model, which judges the text with Moses' tokenisation undone",
    )
    parser.add_argument(
        "--show", type=arguments.positive, metavar="N", help="print the models' samples for N prompts below each other"
    )
    parser.add_argument("--remove-bpe", metavar="SYMBOL", nargs="?", const="@@ ", help=arguments.REMOVE_BPE)
    parser.add_argument("--seed", type=int, default=1, help="of the samples (default: 1)")
    arguments.add_outputs(parser, figure=False)


def run(args: argparse.Namespace) -> int:
    """Print one row a checkpoint."""
    from fairseq_ms.analysis import checkpoints, report
    from fairseq_ms.analysis.sample_metrics import samples
    from fairseq_ms.errors import UsageError

    report.check_outputs(args.json, None)
    report.require_package("sacrebleu", "Ref-BLEU", "sacrebleu")
    if not args.temperature > 0:
        raise UsageError(f"--temperature must be above 0: got {args.temperature}")
    if args.ngram_lm and args.estimate_ngram_lm:
        raise UsageError("--ngram-lm and --estimate-ngram-lm must not be given together: got both")
    loaded = arguments.load_checkpoints(args)
    checkpoints.require_one_dictionary(loaded, args.command)
    for checkpoint in loaded:
        samples.check_lengths(checkpoint, args.prefix_size, args.length)
    with tempfile.TemporaryDirectory() as folder:
        judges = _judges(args, loaded[0], folder)
        results = [_measure(args, checkpoint, judges) for checkpoint in loaded]
    header = ["", *(f"{name} PPL" for name in judges), "Ref-BLEU", *(f"repeat-{n}" for n in range(1, 5)), "s/seq"]
    rows = [[result.label, *(result.numbers[name] for name in header[1:])] for result in results]
    print(
        f"{len(results[0].samples)} prompts of {args.prefix_size} tokens, {args.completions} completions of "
        f"{args.length}, top-{args.sampling_topk} at {args.temperature:g}"
    )
    print(report.format_table(header, rows))
    if not judges:
        print("no perplexities: give --ngram-lm, --estimate-ngram-lm or --hf-lm")
    if args.show:
        print("\n".join(_side_by_side(results, args.show)))
    arguments.write_results(args, loaded, [result.as_dict() for result in results])
    return 0


def _side_by_side(results: list[Result], count: int) -> list[str]:
    """Lines with a context and every model's first completion of it, as in Table 9, for the first prompts."""
    from fairseq_ms.analysis.sample_metrics import natural

    lines = []
    for number in range(min(count, len(results[0].samples))):
        for place, result in enumerate(results):
            shown = result.samples[number]
            completions = shown["completions"]
            assert isinstance(completions, list)
            before, after = natural.continuation(str(shown["context"]).split(), str(completions[0]).split())
            lines += ["", f"prompt {number + 1}", before] if place == 0 else []
            lines += ["", result.label, after.lstrip(" ")]
    return lines


def _judges(args: argparse.Namespace, checkpoint: Checkpoint, folder: str) -> dict[str, Judge]:
    """Who judges samples, by name."""
    import torch

    from fairseq_ms.analysis import checkpoints
    from fairseq_ms.analysis.sample_metrics import natural, ngram_lm, pretrained_lm, samples

    judges: dict[str, Judge] = {}
    path = args.ngram_lm
    if args.estimate_ngram_lm:
        words = samples.words_of(checkpoint, torch.cat(checkpoints.documents(checkpoint, "train")), args.remove_bpe)
        path = ngram_lm.estimate(ngram_lm.sentences(words), 4, folder)
    if path:
        ngram = ngram_lm.NGramModel(path)
        judges["n-gram"] = lambda contexts, texts: ngram_lm.perplexity(ngram, contexts, texts)
    if args.hf_lm:
        model, tokenizer = pretrained_lm.load(args.hf_lm, checkpoint.device)

        def judge(contexts: list[list[str]], texts: list[list[str]]) -> float:
            pairs = [natural.continuation(context, text) for context, text in zip(contexts, texts)]
            before, after = zip(*pairs)
            return pretrained_lm.perplexity(model, tokenizer, before, after)

        judges["GPT-2"] = judge
    return judges


def _measure(args: argparse.Namespace, checkpoint: Checkpoint, judges: dict[str, Judge]) -> Result:
    import torch

    from fairseq_ms.analysis import checkpoints
    from fairseq_ms.analysis.sample_metrics import samples

    tokens = torch.cat(checkpoints.documents(checkpoint, args.gen_subset))
    prompts, truths = samples.cut_prompts(tokens, args.prefix_size, args.length, args.prompts)
    sampler = samples.Sampler(checkpoint, args.length, args.sampling_topk, args.temperature, args.completions)
    batches = prompts.split(args.batch_size)
    drawn = torch.cat([sampler.sample(batch, args.seed + index) for index, batch in enumerate(batches)])
    # (R, completions, length) -> R * completions rows, each with the words of its prompt
    rows = drawn.flatten(0, 1)
    texts = [samples.words_of(checkpoint, row, args.remove_bpe) for row in rows]
    contexts = [
        samples.words_of(checkpoint, prompt, args.remove_bpe) for prompt in prompts for _ in range(args.completions)
    ]
    grouped = [texts[start : start + args.completions] for start in range(0, len(texts), args.completions)]
    numbers = {f"{name} PPL": judge(contexts, texts) for name, judge in judges.items()}
    numbers["Ref-BLEU"] = samples.reference_bleu(
        [" ".join(samples.words_of(checkpoint, truth, args.remove_bpe)) for truth in truths],
        [[" ".join(text) for text in group] for group in grouped],
    )
    numbers |= samples.repeats(rows.tolist())
    single = samples.Sampler(checkpoint, args.length, args.sampling_topk, args.temperature)
    numbers["s/seq"] = samples.seconds_a_sequence(single, prompts[: args.timed], args.seed)
    shown: list[dict[str, object]] = [
        {"context": " ".join(contexts[index * args.completions]), "completions": [" ".join(text) for text in group]}
        for index, group in enumerate(grouped)
    ]
    return Result(checkpoint.label, numbers, shown)
