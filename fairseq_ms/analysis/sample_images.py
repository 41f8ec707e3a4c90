"""``fairseq-ms sample-images``: 32 x 32 images, drawn from a model of pixels or completed from their upper halves."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_ms.analysis import arguments
from fairseq_ms.analysis.flags import add_counts
from fairseq_ms.errors import UsageError

if TYPE_CHECKING:
    from fairseq.data import Dictionary
    from torch import Tensor

    from fairseq_ms.analysis.checkpoints import Checkpoint


SIDE = 32
TOKENS = 3 * SIDE * SIDE
"""Red, green and blue of every pixel, row by row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("data", help="fairseq's data folder, as fairseq-ms prepare images writes it")
    parser.add_argument("--path", required=True, help="checkpoint of a model of pixels")
    parser.add_argument("--png", required=True, type=Path, help="where the grid goes")
    parser.add_argument("--count", type=int, default=16, help="images to draw from nothing (default: %(default)s)")
    parser.add_argument(
        "--complete", type=int, default=0, help="images of the split to complete, beside the originals (default: none)"
    )
    arguments.add_flag(
        parser,
        "--gen-subset",
        "--split",
        default="valid",
        help="split of the data that images to complete come from (default: %(default)s)",
    )
    parser.add_argument(
        "--keep", type=float, default=0.5, help="share of an image's rows to be given (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="divides the logits (default: %(default)s)")
    add_counts(
        parser,
        ("--columns", 8, "images in a row of the grid"),
        ("--scale", 4, "pixels of the PNG, a side, for one of an image's"),
        ("--batch-size", 32, "images to draw at a time"),
    )
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Draw, complete, and write the grid."""
    import torch

    from fairseq_ms.analysis import checkpoints

    check(args)
    checkpoint = checkpoints.load(args.path, args.data, cpu=True)
    symbols_K = colour_symbols(checkpoint.dictionary)
    torch.manual_seed(args.seed)
    pictures: list[Tensor] = []
    if args.complete:
        originals = given_images(checkpoint, args.gen_subset, args.complete)
        given = round(args.keep * SIDE) * SIDE * 3
        finished = drawn(checkpoint, originals[:, :given], symbols_K, args.temperature, args.batch_size)
        pictures += [picture for pair in zip(originals, finished) for picture in pair]
    if args.count:
        nothing = torch.empty(args.count, 0, dtype=torch.long)
        pictures += list(drawn(checkpoint, nothing, symbols_K, args.temperature, args.batch_size))
    write_grid([colours(picture, symbols_K) for picture in pictures], args.png, args.columns, args.scale)
    print(f"{args.count} images drawn, {args.complete} completed from {args.gen_subset}: {args.png}")
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise ``UsageError`` for flags out of range."""
    if min(args.count, args.complete) < 0 or args.count + args.complete == 0:
        raise UsageError(
            f"--count or --complete must be at least 1, and neither below 0: got {args.count} and {args.complete}"
        )
    if not 0 < round(args.keep * SIDE) < SIDE:
        raise UsageError(f"--keep must leave between 1 and {SIDE - 1} rows of {SIDE}: got {args.keep}")
    if not args.temperature > 0.0:
        raise UsageError(f"--temperature must be greater than 0: got {args.temperature}")
    arguments.check_checkpoint(args.path, "--path")


def colour_symbols(dictionary: Dictionary) -> Tensor:
    """(256,) the dictionary's index of every colour value; ``UsageError`` for a dictionary of something else."""
    import torch

    found = [dictionary.index(str(value)) for value in range(256)]
    if dictionary.unk() in found or len(dictionary) != 256 + dictionary.nspecial:
        raise UsageError(f"data must be images, with the 256 colour values for symbols: got {len(dictionary)} symbols")
    return torch.tensor(found)


def given_images(checkpoint: Checkpoint, split: str, count: int) -> Tensor:
    """(count, 3072) tokens of the first images of a split."""
    import torch

    from fairseq_ms.analysis import checkpoints

    checkpoint.task.args.sample_break_mode = "eos"
    # One more, so that a longer image is not cut to what is wanted.
    images = checkpoints.documents(checkpoint, split, limit=count * TOKENS + 1)
    if any(image.numel() != TOKENS for image in images):
        raise UsageError(f"data must have {TOKENS} tokens an image: got {images[0].numel()}")
    if len(images) < count:
        raise UsageError(f"--complete must be at most the {len(images)} images of {split!r}: got {count}")
    return torch.stack(images)


def drawn(
    checkpoint: Checkpoint, given_BT: Tensor, symbols_K: Tensor, temperature: float, batch_size: int = 32
) -> Tensor:
    """Continue images of which T tokens are given, in batches; (B, T) to (B, 3072) tokens.

    All that is given is read in one pass, and one cached step is made for each token that is drawn.
    """
    import torch
    from tqdm import tqdm

    words, batches = checkpoint.dictionary, given_BT.split(batch_size)
    # What stands before the first colour of every image in training.
    start = torch.tensor([words.bos(), words.eos()] if checkpoint.adds_bos else [words.eos()])
    parts = []
    steps = TOKENS - given_BT.shape[1]
    with torch.no_grad(), tqdm(total=steps * len(batches), unit=" tokens", desc="drawing") as bar:
        for given in batches:
            tokens_BT = torch.cat([start.repeat(given.shape[0], 1), given], dim=1)
            state: dict[str, object] = {}
            for _ in range(steps):
                logits_BTV = checkpoint.model.decoder(tokens_BT, incremental_state=state)[0]
                picked_B1 = torch.multinomial((logits_BTV[:, -1, symbols_K] / temperature).softmax(dim=1), 1)
                tokens_BT = torch.cat([tokens_BT, symbols_K[picked_B1]], dim=1)
                bar.update()
            parts.append(tokens_BT[:, len(start) :])
    return torch.cat(parts)


def colours(tokens_T: Tensor, symbols_K: Tensor) -> Tensor:
    """(3072,) tokens of one image to (32, 32, 3) bytes."""
    import torch

    value_of = torch.zeros(int(symbols_K.max()) + 1, dtype=torch.uint8)
    value_of[symbols_K] = torch.arange(256, dtype=torch.uint8)
    return value_of[tokens_T].view(SIDE, SIDE, 3)


def write_grid(pictures: list[Tensor], path: Path, columns: int, scale: int) -> None:
    """Write (32, 32, 3) images as one PNG, side by side with a white line between them."""
    import torch
    from PIL import Image

    rows, cell = -(-len(pictures) // columns), SIDE + 1
    grid = torch.full((rows * cell + 1, min(columns, len(pictures)) * cell + 1, 3), 255, dtype=torch.uint8)
    for index, picture in enumerate(pictures):
        top, left = index // columns * cell + 1, index % columns * cell + 1
        grid[top : top + SIDE, left : left + SIDE] = picture
    image = Image.fromarray(grid.numpy())
    image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    image.save(partial, format="PNG")
    partial.replace(path)
