"""Perplexity under other models, reference BLEU, repetition and speed of samples.

Multi-scale Transformer LMs, Section 6.3, Table 5.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fairseq_ms.errors import UsageError
from fairseq_ms.papers import _judges as judging
from fairseq_ms.tools import comparison, report
from fairseq_ms.tools.arguments import add_counts, add_outputs, add_remove_bpe, add_scored, add_seed, place

if TYPE_CHECKING:
    from torch import Tensor

    from fairseq_ms.tools.checkpoints import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_scored(parser)
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
    help = "estimate a 4-gram of the training split with kenlm's lmplz"
    parser.add_argument("--estimate-ngram-lm", action="store_true", help=help)
    help = "local folder of GPT-2 or another causal model, which judges the text with Moses' tokenisation undone"
    parser.add_argument("--hf-lm", type=place, metavar="FOLDER", help=help)
    add_remove_bpe(parser)
    add_seed(parser, "the samples")
    add_outputs(parser, figure=False)


def run(args: argparse.Namespace) -> None:
    report.require_package("sacrebleu", "Ref-BLEU", "sacrebleu")
    if not args.temperature > 0:
        raise UsageError(f"--temperature must be above 0: got {args.temperature}")
    if args.ngram_lm and args.estimate_ngram_lm:
        raise UsageError("--ngram-lm and --estimate-ngram-lm must not be given together: got both")
    loaded = comparison.load(args)
    for checkpoint in loaded:
        check_lengths(checkpoint, args.prefix_size, args.length)
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
    comparison.write(args, loaded, results)


def side_by_side(results: list[dict[str, Any]], count: int) -> list[str]:
    """Lines with a context and every model's first completion of it, as in Table 9, for the first prompts."""
    lines = []
    for number, shown in enumerate(results[0]["samples"][:count]):
        lines += ["", f"prompt {number + 1}", judging.continuation(shown["context"].split(), [])[0]]
        for result in results:
            sample = result["samples"][number]
            _, after = judging.continuation(sample["context"].split(), sample["completions"][0].split())
            lines += ["", result["label"], after.lstrip(" ")]
    return lines


def _judges(args: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, judging.Judge]:
    """Who judges samples, by name."""
    found: dict[str, judging.Judge] = {}
    if args.ngram_lm:
        found["n-gram"] = judging.NGramModel(args.ngram_lm).perplexity
    if args.estimate_ngram_lm:
        words = words_of(checkpoint, checkpoint.text("train"), args.remove_bpe)
        with tempfile.TemporaryDirectory() as folder:
            path = judging.estimate(judging.sentences(words), 4, folder)
            found["n-gram"] = judging.NGramModel(path).perplexity
    if args.hf_lm:
        pretrained = judging.load_pretrained(args.hf_lm, checkpoint.device)
        found["GPT-2"] = partial(judging.pretrained_perplexity, *pretrained)
    return found


def _measure(args: argparse.Namespace, checkpoint: Checkpoint, judges: dict[str, judging.Judge]) -> dict[str, Any]:
    """A checkpoint's label, its numbers by the table's header, and a context with its completions for each prompt."""
    import torch

    from fairseq_ms.tools.training_step import shortest

    def words(tokens_T: Tensor) -> str:
        return " ".join(words_of(checkpoint, tokens_T, args.remove_bpe))

    tokens = checkpoint.text(args.gen_subset)
    prompts, truths = cut_prompts(tokens, args.prefix_size, args.length, args.prompts)
    draw = partial(sample, checkpoint, length=args.length, topk=args.sampling_topk, temperature=args.temperature)
    batches = enumerate(prompts.split(args.batch_size), args.seed)
    drawn_RCT = torch.cat([draw(batch, completions=args.completions, seed=seed) for seed, batch in batches])
    contexts = [words(prompt) for prompt in prompts]
    texts = [[words(sample) for sample in completions] for completions in drawn_RCT]
    before = [context.split() for context in contexts for _ in range(args.completions)]
    after = [text.split() for group in texts for text in group]
    found: dict[str, Any] = {"label": checkpoint.label}
    found |= {f"{name} PPL": judge(before, after) for name, judge in judges.items()}
    found["Ref-BLEU"] = reference_bleu([words(truth) for truth in truths], texts)
    tokens_of = drawn_RCT.flatten(0, 1).tolist()
    for order in (1, 2, 3, 4):
        found[f"repeat-{order}"] = float(np.mean([repeated_fraction(one, order) for one in tokens_of]))
    single = [partial(draw, prompt, completions=1, seed=args.seed) for prompt in prompts[: args.timed].split(1)]
    found["s/seq"] = float(np.median([shortest(run, checkpoint.device, repeats=1) for run in single]))
    return {**found, "samples": [{"context": one, "completions": group} for one, group in zip(contexts, texts)]}


def cut_prompts(tokens: Tensor, context: int, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Up to ``count`` prompts (R, context), evenly spread over a split, and the ``length`` tokens after each.

    Raises UsageError when the split is shorter than one prompt with what follows.
    """
    import torch

    places = (tokens.numel()) // (context + length)
    if places < 1:
        raise UsageError(f"--length must leave room for one sample in the {tokens.numel()} tokens: got {length}")
    starts = np.linspace(0, places - 1, min(count, places)).round().astype(int) * (context + length)
    windows = torch.stack([tokens[start : start + context + length] for start in starts.tolist()])
    return windows[:, :context], windows[:, context:]


def sample(
    checkpoint: Checkpoint, prompts_RT: Tensor, length: int, topk: int, temperature: float, completions: int, seed: int
) -> Tensor:
    """Completions (R, completions, length) of prompts (R, T); a seed gives the same ones again.

    Drawn by fairseq's generator from the ``topk`` likeliest tokens, logits divided by ``temperature``; the end of a
    sentence is a token like any other.
    """
    import torch
    from fairseq.search import Sampling
    from fairseq.sequence_generator import SequenceGenerator

    dictionary, total = checkpoint.dictionary, prompts_RT.size(1) + length
    # The generator's end of sentence is a symbol that no text has, so that it stands at the very end alone.
    generator = SequenceGenerator(
        [checkpoint.model],
        dictionary,
        beam_size=completions,
        max_len_a=0,
        max_len_b=total,
        max_len=total + 1,
        min_len=total,
        temperature=temperature,
        normalize_scores=False,
        eos=dictionary.bos(),
        symbols_to_strip_from_output=set(),
        search_strategy=Sampling(dictionary, sampling_topk=min(topk, len(dictionary) - 1)),
    )
    prompts = prompts_RT.to(checkpoint.device)
    lengths = prompts.new_full((prompts.size(0),), prompts.size(1))
    batch = {"net_input": {"src_tokens": prompts, "src_lengths": lengths}}
    begin = dictionary.bos() if checkpoint.adds_bos else dictionary.eos()
    torch.manual_seed(seed)
    found = generator.generate([checkpoint.model], batch, prefix_tokens=prompts, bos_token=begin)
    return torch.stack([torch.stack([one["tokens"][-length - 1 : -1].cpu() for one in row]) for row in found])


def check_lengths(checkpoint: Checkpoint, context: int, length: int) -> None:
    """Raise UsageError when prompt and sample, with the symbol before them, do not fit into the positions."""
    longest = checkpoint.longest
    if longest is not None and context + length + 1 > longest:
        raise UsageError(
            f"--prefix-size and --length must add up to less than the {longest} positions of {checkpoint.label}: "
            f"got {context} and {length}"
        )


def repeated_fraction(tokens: Sequence[object], order: int) -> float:
    """The fraction of a sequence's n-grams that have occurred in it before; 0.0 if it has none."""
    grams = [tuple(tokens[start : start + order]) for start in range(len(tokens) - order + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def reference_bleu(truths: Sequence[str], completions: Sequence[Sequence[str]]) -> float:
    """BLEU of true continuations, each against the completions of its prompt as references, by words as they are."""
    from sacrebleu.metrics import BLEU

    references = [list(one) for one in zip(*completions)]
    return float(BLEU(tokenize="none", force=True).corpus_score(list(truths), references).score)


def words_of(checkpoint: Checkpoint, tokens_T: Tensor, bpe_symbol: str | None) -> list[str]:
    """Tokens as words, ends of sentences included, pieces of words joined where the symbol marks them."""
    dictionary = checkpoint.dictionary
    text = " ".join(dictionary[int(token)] for token in tokens_T)
    if bpe_symbol:
        text = f"{text} ".replace(bpe_symbol, "").strip()
    return text.split()
