"""`fairseq-ms sample-metrics`: what a model's samples are like (Multi-scale Transformer LMs, Table 5)."""

from __future__ import annotations

import argparse
import tempfile
from typing import TYPE_CHECKING, Any

from fairseq_ms.analysis import arguments, comparison, report
from fairseq_ms.analysis.flags import add_counts
from fairseq_ms.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from fairseq_ms.analysis.checkpoints import Checkpoint
    from fairseq_ms.analysis.sample_metrics.judges import NGramModel, PretrainedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, sampling, judges and output; the defaults are the paper's."""
    arguments.add_checkpoints(parser)
    add_counts(
        parser,
        ("--prompts", 100, "contexts from the split"),
        ("--prefix-size --context", 64, "tokens of a context"),
        ("--length", 256, "tokens of a sample"),
        ("--completions", 3, "samples a prompt"),
        ("--sampling-topk", 10, "draw from the N likeliest tokens"),
        ("--batch-size", 8, "prompts in a batch"),
        ("--timed", 5, "prompts timed"),
        ("--show", None, "print the models' samples for N prompts below each other"),
    )
    parser.add_argument("--temperature", type=float, default=0.7, help="divides the logits (default: 0.7)")
    parser.add_argument("--ngram-lm", metavar="FILE", help="kenlm model of the tokenised text, ARPA or binary")
    parser.add_argument(
        "--estimate-ngram-lm", action="store_true", help="estimate a 4-gram of the training split with kenlm's lmplz"
    )
    parser.add_argument(
        "--hf-lm",
        metavar="FOLDER",
        help="local folder of GPT-2 or another causal model, which judges the text with Moses' tokenisation undone",
    )
    parser.add_argument("--remove-bpe", metavar="SYMBOL", nargs="?", const="@@ ", help=arguments.REMOVE_BPE)
    parser.add_argument("--seed", type=int, default=1, help="of the samples (default: 1)")
    arguments.add_outputs(parser, figure=False)


def run(args: argparse.Namespace) -> int:
    """Print one row a checkpoint."""
    from fairseq_ms.analysis.sample_metrics import samples

    report.check_outputs(args.json, None)
    report.require_package("sacrebleu", "Ref-BLEU", "sacrebleu")
    if not args.temperature > 0:
        raise UsageError(f"--temperature must be above 0: got {args.temperature}")
    if args.ngram_lm and args.estimate_ngram_lm:
        raise UsageError("--ngram-lm and --estimate-ngram-lm must not be given together: got both")
    loaded = comparison.load(args)
    for checkpoint in loaded:
        samples.check_lengths(checkpoint, args.prefix_size, args.length)
    judges = _judges(args, loaded[0])
    results = [_measure(args, checkpoint, judges) for checkpoint in loaded]
    columns = [name for name in results[0] if name not in ("label", "samples")]
    print(
        f"{len(results[0]['samples'])} prompts of {args.prefix_size} tokens, {args.completions} completions of "
        f"{args.length}, top-{args.sampling_topk} at {args.temperature:g}"
    )
    rows = [[result[name] for name in ("label", *columns)] for result in results]
    print(report.format_table(["", *columns], rows))
    if not judges:
        print("no perplexities: give --ngram-lm, --estimate-ngram-lm or --hf-lm")
    if args.show:
        print("\n".join(side_by_side(results, args.show)))
    arguments.write_results(args, loaded, results)
    return 0


def side_by_side(results: list[dict[str, Any]], count: int) -> list[str]:
    """Lines with a context and every model's first completion of it, as in Table 9, for the first prompts."""
    from fairseq_ms.analysis.sample_metrics.judges import continuation

    lines = []
    for number, shown in enumerate(results[0]["samples"][:count]):
        lines += ["", f"prompt {number + 1}", continuation(shown["context"].split(), [])[0]]
        for result in results:
            sample = result["samples"][number]
            _, after = continuation(sample["context"].split(), sample["completions"][0].split())
            lines += ["", result["label"], after.lstrip(" ")]
    return lines


def _judges(args: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, NGramModel | PretrainedModel]:
    """Who judges samples, by name."""
    import torch

    from fairseq_ms.analysis import checkpoints
    from fairseq_ms.analysis.sample_metrics import judges, samples

    found: dict[str, NGramModel | PretrainedModel] = {}
    if args.ngram_lm:
        found["n-gram"] = judges.NGramModel(args.ngram_lm)
    if args.estimate_ngram_lm:
        words = samples.words_of(checkpoint, torch.cat(checkpoints.documents(checkpoint, "train")), args.remove_bpe)
        with tempfile.TemporaryDirectory() as folder:
            found["n-gram"] = judges.NGramModel(judges.estimate(judges.sentences(words), 4, folder))
    if args.hf_lm:
        found["GPT-2"] = judges.PretrainedModel(args.hf_lm, checkpoint.device)
    return found


def _measure(
    args: argparse.Namespace, checkpoint: Checkpoint, judges: dict[str, NGramModel | PretrainedModel]
) -> dict[str, Any]:
    """A checkpoint's label, its numbers by the table's header, and a context with its completions for each prompt."""
    import torch

    from fairseq_ms.analysis import checkpoints
    from fairseq_ms.analysis.sample_metrics import samples

    def words(tokens_T: Tensor) -> list[str]:
        return samples.words_of(checkpoint, tokens_T, args.remove_bpe)

    tokens = torch.cat(checkpoints.documents(checkpoint, args.gen_subset))
    prompts, truths = samples.cut_prompts(tokens, args.prefix_size, args.length, args.prompts)
    sampler = samples.Sampler(checkpoint, args.length, args.sampling_topk, args.temperature, args.completions)
    batches = prompts.split(args.batch_size)
    drawn_RCT = torch.cat([sampler.sample(batch, args.seed + index) for index, batch in enumerate(batches)])
    contexts = [words(prompt) for prompt in prompts]
    texts = [[words(sample) for sample in completions] for completions in drawn_RCT]
    shown = [
        {"context": " ".join(context), "completions": [" ".join(text) for text in group]}
        for context, group in zip(contexts, texts)
    ]
    before = [context for context in contexts for _ in range(args.completions)]
    after = [text for group in texts for text in group]
    found: dict[str, Any] = {"label": checkpoint.label}
    found |= {f"{name} PPL": judge.perplexity(before, after) for name, judge in judges.items()}
    found["Ref-BLEU"] = samples.reference_bleu(
        [" ".join(words(truth)) for truth in truths], [[" ".join(text) for text in group] for group in texts]
    )
    found |= samples.repeats(drawn_RCT.flatten(0, 1).tolist())
    single = samples.Sampler(checkpoint, args.length, args.sampling_topk, args.temperature)
    found["s/seq"] = samples.seconds_a_sequence(single, prompts[: args.timed], args.seed)
    return {**found, "samples": shown}
