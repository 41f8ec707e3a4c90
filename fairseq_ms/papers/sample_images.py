"""Draw 32 x 32 images from a model of pixels, and complete given ones, as a PNG grid."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import arguments
from fairseq_ms.tools.arguments import add_counts, add_flag, add_seed, place
from fairseq_ms_pipeline.files import complete

if TYPE_CHECKING:
    from fairseq.data import Dictionary
    from torch import Tensor

    from fairseq_ms.tools.checkpoints import Checkpoint

SIDE = 32
TOKENS = 3 * SIDE * SIDE
"""Red, green and blue of every pixel, row by row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=place, help="fairseq's data folder, as fairseq-ms prepare images writes it")
    parser.add_argument("--path", type=place, required=True, help="checkpoint of a model of pixels")
    parser.add_argument("--png", dest="grid", required=True, type=Path, help="where the grid goes; its folder is made")
    parser.add_argument("--count", type=int, default=16, help="images to draw from nothing (default: 16)")
    help = "images of the split to complete, beside the originals (default: none)"
    parser.add_argument("--complete", type=int, default=0, help=help)
    help = "split of the data that images to complete come from (default: valid)"
    add_flag(parser, "--gen-subset", "--split", default="valid", help=help)
    parser.add_argument("--keep", type=float, default=0.5, help="share of an image's rows to be given (default: 0.5)")
    parser.add_argument("--temperature", type=float, default=1.0, help="divides the logits (default: 1.0)")
    add_counts(
        parser,
        ("--columns", 8, "images in a row of the grid"),
        ("--scale", 4, "pixels of the PNG, a side, for one of an image's"),
        ("--batch-size", 32, "images to draw at a time"),
    )
    add_seed(parser, "the random numbers")


def run(args: argparse.Namespace) -> None:
    """Draw, complete, and write the grid."""
    import torch

    check(args)
    arguments.register()
    from fairseq_ms.tools import checkpoints

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
    # (B, 3072) tokens to (B, 32, 32, 3) bytes
    colours = (torch.stack(pictures)[..., None] == symbols_K).byte().argmax(-1).byte().view(-1, SIDE, SIDE, 3)
    write_grid(colours, args.grid, args.columns, args.scale)
    print(f"{args.count} images drawn, {args.complete} completed from {args.gen_subset}: {args.grid}")


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

    checkpoint.by_line = True
    # One more, so that a longer image is not cut to what is wanted.
    images = checkpoint.documents(split, limit=count * TOKENS + 1)
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
    core, steps, parts = checkpoint.model.decoder.core, TOKENS - given_BT.shape[1], []
    allowed = torch.zeros(core.config.vocab_size, dtype=torch.bool).index_fill(0, symbols_K, True)
    with tqdm(total=steps * len(batches), unit=" tokens", desc="drawing") as bar:

        def count(_: Tensor) -> bool:
            bar.update()
            return False

        for given in batches:
            prompt_BT = torch.cat([start.repeat(given.shape[0], 1), given], dim=1)
            tokens_BT = core.generate(prompt_BT, steps, temperature, allowed=allowed, stop=count)
            parts.append(tokens_BT[:, len(start) :])
    return torch.cat(parts)


def write_grid(pictures: Tensor, path: Path, columns: int, scale: int) -> None:
    """Write (B, 32, 32, 3) images as one PNG, side by side with a white line between them."""
    from PIL import Image, ImageOps

    rows, cell = -(-len(pictures) // columns), SIDE + 1
    image = Image.new("RGB", (min(columns, len(pictures)) * cell + 1, rows * cell + 1), "white")
    for index, picture in enumerate(pictures):
        image.paste(Image.fromarray(picture.numpy()), (index % columns * cell + 1, index // columns * cell + 1))
    image = ImageOps.scale(image, scale, Image.Resampling.NEAREST)
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path) as part:
        image.save(part, format="PNG")
