"""Print the bag of words that coarse_lm checkpoints predict after a context.

Multi-scale Transformer LMs, Section 6.2, Table 7.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import comparison, report
from fairseq_ms.tools.arguments import add_checkpoints, add_counts, add_cpu, add_data, add_flag, add_outputs

if TYPE_CHECKING:
    from fairseq_ms.tools.checkpoints import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoints(parser, "fairseq-train wrote with --arch coarse_lm")
    contexts = parser.add_mutually_exclusive_group(required=True)
    help = "what was read so far, tokenised and segmented as the training text (repeatable)"
    add_flag(contexts, "--text", "--context", action="append", metavar="TEXT", help=help)
    contexts.add_argument("--input", metavar="FILE", help="read the contexts from a file, one a line; - is stdin")
    add_counts(parser, ("--top", None, "words to print (default: as many as the scale has tokens)"))
    add_data(parser)
    add_cpu(parser)
    add_outputs(parser, figure=False)


def run(args: argparse.Namespace) -> None:
    """Print a table of completions for every context, coarsest model last, and write the JSON file."""
    contexts = args.text if args.text is not None else read_lines(args.input)
    loaded = sorted(comparison.load(args, alike=False), key=scale_of)
    results = []
    for context in contexts:
        print(f"Context: {context}")
        completions = [complete(checkpoint, context, args.top) for checkpoint in loaded]
        rows = [[found["label"], f"{found['scale']}x", "  ".join(found["words"])] for found in completions]
        print(report.format_table(["checkpoint", "scale", "completion"], rows), end="\n\n")
        results.append({"context": context, "completions": completions})
    comparison.write(args, loaded, results)


def read_lines(path: str) -> list[str]:
    """The lines of a file that are not blank; UsageError when there are none."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--input must be text in UTF-8: got {path} ({error})") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"--input must have at least one line that is not blank: got {path}")
    return lines


def scale_of(checkpoint: Checkpoint) -> int:
    """The scale of a checkpoint's model; UsageError when it is no ``coarse_lm``."""
    from fairseq_ms.models.coarse import CoarseLanguageModel

    if not isinstance(checkpoint.model, CoarseLanguageModel):
        arch = checkpoint.cfg.model._name
        raise UsageError(f"CHECKPOINT must hold a model of --arch coarse_lm: {checkpoint.path} holds {arch}")
    return int(checkpoint.model.decoder.core.factor)


def readable(tokens: int, scale: int, positions: int, bos: bool = False) -> int:
    """How many of a context's last tokens to read, so that a k-gram ends exactly with the last of them.

    The first k-gram is the first token alone, so this is 1 more than a multiple of the scale; where every row begins
    with the symbol of ``--add-bos-token``, that is the first, and this is a multiple of the scale.
    """
    first = 0 if bos else 1
    return (min(tokens, positions) - first) // scale * scale + first


def complete(checkpoint: Checkpoint, context: str, top: int | None = None) -> dict[str, Any]:
    """The ``top`` most probable words (as many as the scale, if not given) of the bag after a context.

    Beside "words" and "probabilities" it holds the checkpoint's "label", its "scale", for how many tokens the bag
    stands, and how many of the context's last tokens were "read". The context is words separated by spaces, as in the
    training text; UsageError if it is empty.
    """
    import torch

    words, scale = checkpoint.dictionary, scale_of(checkpoint)
    tokens_T = words.encode_line(context, add_if_not_exist=False, append_eos=False).long()
    if tokens_T.numel() == 0:
        raise UsageError(f"--text must have at least one word: got {context!r}")
    read = readable(tokens_T.numel(), scale, int(checkpoint.model.max_positions()), checkpoint.adds_bos)
    bos_T = tokens_T.new_tensor([words.bos()] if checkpoint.adds_bos else [])
    source_BT = torch.cat([bos_T, tokens_T[tokens_T.numel() - read :]]).unsqueeze(0).to(checkpoint.device)
    with torch.no_grad():
        output = checkpoint.model(source_BT, per_block=True)
        log_probs_V = checkpoint.model.get_normalized_probs(output, log_probs=True)[0, -1].float()
    best, found = log_probs_V.topk(min(top or scale, log_probs_V.numel()))
    completion = {"words": [words[int(word)] for word in found], "probabilities": best.exp().tolist()}
    return {"label": checkpoint.label, "scale": scale, "read": read, **completion}
