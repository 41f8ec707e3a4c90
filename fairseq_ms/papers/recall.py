"""Accuracy of recalling a symbol by its distance, beside the context by formula."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from fairseq_ms.errors import UsageError
from fairseq_ms.papers import context_length
from fairseq_ms.papers.context_length import ContextLength
from fairseq_ms.tools import comparison, report
from fairseq_ms.tools.arguments import add_counts, add_outputs, add_scored, add_seed, add_window
from fairseq_ms_pipeline.files import parsed

if TYPE_CHECKING:
    from torch import Tensor

    from fairseq_ms.core.scales import Scale
    from fairseq_ms.tools.checkpoints import Checkpoint

# Streams that a model with a memory reads side by side.
_STREAMS = 32
# Right answers beyond the context are an accident up to so many standard deviations of guessing.
_ACCIDENT = 4.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_scored(parser)
    add_window(parser)
    add_counts(parser, ("--bins", 16, "ranges of distances"), ("--limit", None, "read only the first N tokens"))
    add_seed(parser, "the guesses")
    add_outputs(parser)


def run(args: argparse.Namespace) -> None:
    """Print accuracy by distance, and each model's context by formula and by recall."""
    from fairseq_ms.tools import scoring

    loaded = comparison.load(args)
    asked = load_questions(loaded[0], args.gen_subset, args.limit)
    answered = {"oracle": oracle_answers(asked), "guessing": guessed_answers(asked, args.seed)}
    columns = {name: by_distance(asked.distances, right, args.bins) for name, right in answered.items()}
    results = []
    for checkpoint in loaded:
        window, context = checkpoint.segment, 0
        if not checkpoint.streaming:
            window, context = scoring.check_window(checkpoint, args.tokens_per_sample, args.context_window)
        right = right_answers(checkpoint, asked, window, context, args.max_tokens)
        results.append(summarise(checkpoint.label, reach(checkpoint, window, context), asked, right, args.bins))
    curves = [*columns.values(), *(result.bins for result in results)]
    rows: list[list[object]] = [
        [f"{points[0].first}-{points[0].last}", points[0].asked, *(round(point.accuracy, 3) for point in points)]
        for points in zip(*curves)
    ]
    means = (np.average([p.accuracy for p in points], weights=[p.asked for p in points]) for points in curves)
    rows.append(["all", len(asked.answers), *(round(float(mean), 3) for mean in means)])
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
    found: dict[str, object] = {name: [asdict(point) for point in points] for name, points in columns.items()}
    found |= {"chance": asked.chance, "models": [asdict(result) for result in results]}
    comparison.write(args, loaded, found, lambda figure: draw(figure, results, asked.chance))


@dataclass(frozen=True)
class Questions:
    """The symbols that are asked for in a sequence of tokens.

    Attributes:
        tokens: the sequence (n,)
        answers: where they stand (Q,)
        written: where the passage has them (Q,)
        choices: the symbols that passages consist of
    """

    tokens: Tensor
    answers: np.ndarray
    written: np.ndarray
    choices: Tensor

    @property
    def distances(self) -> np.ndarray:
        """How many tokens before the last one that is read they were written (Q,)."""
        return self.answers - 1 - self.written

    @property
    def chance(self) -> float:
        """The accuracy of guessing."""
        return 1.0 / self.choices.numel()


def load_questions(checkpoint: Checkpoint, split: str, limit: int | None = None) -> Questions:
    """The questions of a split of ``fairseq-ms prepare recall``, or of its first ``limit`` tokens.

    Raises UsageError when the data say nothing of questions, and when the split has none.
    """
    import torch

    path = checkpoint.folder / "recall.json"
    if not path.is_file():
        raise UsageError(
            f"--data must be the folder bin/ that fairseq-ms prepare recall wrote: {checkpoint.folder} holds no "
            f"{path.name}, which says how questions are written"
        )
    try:
        written = parsed(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"--data must be as fairseq-ms prepare recall wrote it: {path} is damaged ({error})") from None
    index = checkpoint.dictionary.index
    choices = torch.tensor([index(symbol) for symbol in written["choices"]])
    ask = index(written["ask"]) if written["ask"] is not None else None
    tokens = checkpoint.text(split, limit)
    found = _find(
        tokens.tolist(), choices, index(written["set"]), ask, written["key_length"], written["passage_length"]
    )
    if not found:
        raise UsageError(f"--gen-subset must name a split with questions: {split!r} has none")
    answers, passages = np.array(found).T
    return Questions(tokens, answers, passages, choices)


def _find(
    text: list[int], choices: Tensor, set_: int, ask: int | None, key_length: int, passage_length: int
) -> list[tuple[int, int]]:
    """(where an answer stands, where its passage has it) for all questions whose passage stands before them.

    ``set key passage`` stands in a line, and later ``ask key passage``; keys may have no symbols. Without ``ask``, a
    passage's symbol that was not set begins an answer.
    """
    symbols = set(choices.tolist())
    passages: dict[tuple[int, ...], int] = {}
    found: list[tuple[int, int]] = []
    done = 0
    for position, token in enumerate(text):
        sudden = ask is None and token in symbols
        if position < done or not (sudden or token in (set_, ask)):
            continue
        first = position if sudden else position + 1 + key_length
        # The end of the sequence may cut a question short.
        done = min(first + passage_length, len(text))
        key = () if sudden else tuple(text[position + 1 : first])
        if token == set_:
            passages[key] = first
        elif key in passages:
            found += zip(range(first, done), itertools.count(passages[key]))
    return found


@dataclass(frozen=True)
class Bin:
    """Distances ``first`` to ``last``, how many symbols were asked for there, and the share of right answers."""

    first: int
    last: int
    asked: int
    accuracy: float


@dataclass(frozen=True)
class Result:
    """What a model recalls.

    Attributes:
        label: its name
        context: how far back it sees by formula
        bins: accuracy by distance
        recalled: the sum over all distances of the accuracy above chance, 1 where every answer is right: as many tokens
            as a model recalls that is perfect up to there and guesses beyond
        beyond: the bin of all distances from the context's maximum on, or None without any
        leaks: whether it is right beyond its context more often than guessing can be
    """

    label: str
    context: ContextLength
    bins: list[Bin]
    recalled: float
    beyond: Bin | None
    leaks: bool


def right_answers(
    checkpoint: Checkpoint, questions: Questions, window: int, context: int, max_tokens: int
) -> np.ndarray:
    """Whether the model gives each answer (Q,), the likeliest of the choices, having read the true text before it.

    A model without a memory reads windows as in ``fairseq-eval-lm``, one with a memory reads streams, each of which
    begins at a line.
    """
    from fairseq_ms.tools import scoring

    tokens, choices = questions.tokens, questions.choices.to(checkpoint.device)

    def measure(log_probs_1nV: Tensor, targets_1n: Tensor) -> Tensor:
        return (choices[log_probs_1nV[..., choices].argmax(-1)] == targets_1n).float()

    if checkpoint.streaming:
        streams = at_lines(tokens, checkpoint.dictionary.eos(), _STREAMS)
        scores = np.concatenate(scoring.score_streams(checkpoint, streams, measure))
    else:
        scores = scoring.score_documents(checkpoint, [tokens], window, context, max_tokens, measure)
    return scores[questions.answers].astype(bool)


def reach(checkpoint: Checkpoint, window: int, context: int) -> ContextLength:
    """The context length of a streaming model, or of another one in windows of which ``context`` tokens come first.

    The paper's formula holds for a Transformer-XL or Compressive Transformer whose memory is a multiple of the segment.
    Otherwise the oldest state that a layer remembers lies inside a segment, and saw as far back as its first.

    A model without a memory sees what is in its window: ``context`` tokens before the first scored one, and all of the
    window before the last. Through ``--scale-windows`` it sees less: layer by layer, from the last, the oldest block of
    any window. How many tokens that goes back depends on where in a block the position lies.
    """
    from fairseq_ms.core import CompressiveTransformer, Retina, TransformerQL, TransformerXL

    model = checkpoint.model.decoder.core
    if isinstance(model, TransformerQL):
        return context_length.by_formula(model)
    if isinstance(model, TransformerXL):
        remembered, begin, oldest = model.mem_len, 0, 0
        if isinstance(model, CompressiveTransformer):
            remembered += model.config.compression_rate * model.config.compressed_mem_len
        for _ in model.layers:
            oldest = begin - remembered
            begin = oldest // model.segment_len * model.segment_len
        return ContextLength.of(-oldest, model.segment_len)
    sure, most = context, window - 1
    if isinstance(model, Retina):
        layers = [layer.attention.scales for layer in model.layers]
        coarsest = max(scale.factor for scales in layers for scale in scales)
        first = window * coarsest
        seen = [first + phase for phase in range(coarsest)]
        for scales in reversed(layers):
            seen = [min(_oldest(scale, at) for scale in scales) for at in seen]
        gone = [first + phase - oldest for phase, oldest in enumerate(seen)]
        sure, most = min(sure, *gone), min(most, max(gone))
    return ContextLength(sure, most + 1, (sure + most + 1) / 2)


def _oldest(scale: Scale, query: int) -> int:
    """The oldest token in a query's window, the first of a block; below 0 if the window reaches before the text."""
    return 0 if scale.far is None else ((query - scale.far) // scale.factor + 1) * scale.factor


def at_lines(tokens: Tensor, eos: int, count: int) -> list[Tensor]:
    """The sequence in up to ``count`` pieces of about equal length, cut after ends of lines."""
    import torch

    ends = torch.nonzero(tokens == eos).flatten() + 1
    wanted = torch.arange(1, count) * tokens.numel() // count
    # The first end after each place that is wanted; an end after the last token would leave an empty piece.
    cuts = ends[torch.searchsorted(ends, wanted).clamp(max=ends.numel() - 1)] if ends.numel() else ends
    return [piece for piece in tokens.tensor_split(cuts.unique()) if piece.numel()]


def oracle_answers(questions: Questions) -> np.ndarray:
    """Whether each answer (Q,) is the symbol that was written: all of them, or the questions are misread."""
    return (questions.tokens[questions.answers] == questions.tokens[questions.written]).numpy()


def guessed_answers(questions: Questions, seed: int) -> np.ndarray:
    """Whether each answer (Q,) is a symbol drawn from the choices."""
    drawn = np.random.default_rng(seed).integers(questions.choices.numel(), size=questions.answers.size)
    return questions.choices.numpy()[drawn] == questions.tokens[questions.answers].numpy()


def by_distance(distances: np.ndarray, right: np.ndarray, bins: int) -> list[Bin]:
    """Accuracy in up to ``bins`` ranges of distances of equal width, from the shortest that is asked."""
    least, most = int(distances.min()), int(distances.max())
    width = -(-(most - least + 1) // bins)
    found = [_bin(distances, right, first, min(first + width - 1, most)) for first in range(least, most + 1, width)]
    return [point for point in found if point is not None]


def _bin(distances: np.ndarray, right: np.ndarray, first: int, last: int) -> Bin | None:
    inside = right[(distances >= first) & (distances <= last)]
    return Bin(first, last, inside.size, float(inside.mean())) if inside.size else None


def summarise(label: str, context: ContextLength, questions: Questions, right: np.ndarray, bins: int) -> Result:
    """A model's result; an output sees a token at any distance below the context's maximum."""
    distances, chance = questions.distances, questions.chance
    points = by_distance(distances, right, bins)
    # Distances below the shortest that is asked count as recalled like the shortest.
    widths = [point.last - point.first + 1 for point in points]
    widths[0] += points[0].first - 1
    recalled = sum(width * (point.accuracy - chance) / (1 - chance) for width, point in zip(widths, points))
    beyond = _bin(distances, right, context.maximum, int(distances.max()))
    accident = chance + _ACCIDENT * (chance * (1 - chance) / beyond.asked) ** 0.5 if beyond else 1.0
    return Result(label, context, points, recalled, beyond, beyond is not None and beyond.accuracy > accident)


def draw(figure: report.Figure, results: Sequence[Result], chance: float) -> None:
    """Accuracy over distance, one line a model; a vertical line of the same colour is its context by formula.

    Where the context depends on the place in a segment or window, a band goes from the least to the greatest.
    """
    axes = figure.add_subplot()
    longest = max(result.bins[-1].last for result in results)
    for result in results:
        middles = [(point.first + point.last) / 2 for point in result.bins]
        (line,) = axes.plot(middles, [point.accuracy for point in result.bins], label=result.label)
        context = result.context
        if context.average <= longest:
            axes.axvline(context.average, color=line.get_color(), linestyle=line.get_linestyle(), linewidth=1.0)
            most = min(context.maximum, longest)
            axes.axvspan(context.minimum, most, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.axhline(chance, color="black", linewidth=0.8, linestyle=":")
    axes.annotate("chance", (1, chance), va="bottom", fontsize="small")
    axes.set_ylim(0.0, 1.03)
    report.finish_axes(axes, "distance to the symbol, in tokens (vertical: context by formula)", "accuracy of recall")
