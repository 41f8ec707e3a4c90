"""``fairseq-ms sample-images``: 32 x 32 images, drawn from a model of pixels or completed from their upper halves."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_ms.analysis import arguments

if TYPE_CHECKING:
    from fairseq.data import Dictionary
    from fairseq.models import FairseqLanguageModel
    from fairseq.tasks import FairseqTask
    from torch import Tensor
    from tqdm import tqdm


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
    parser.add_argument("--columns", type=int, default=8, help="images in a row of the grid (default: %(default)s)")
    parser.add_argument(
        "--scale", type=int, default=4, help="pixels of the PNG, a side, for one of an image's (default: 4)"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="images to draw at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default: %(default)s)")


def check(args: argparse.Namespace) -> None:
    """Raise ``UsageError`` for flags out of range."""
    from fairseq_ms.errors import UsageError

    for name, least in (("count", 0), ("complete", 0), ("columns", 1), ("scale", 1), ("batch_size", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}: got {getattr(args, name)}")
    if args.count + args.complete == 0:
        raise UsageError("--count or --complete must be at least 1: got 0 and 0")
    if not 0 < round(args.keep * SIDE) < SIDE:
        raise UsageError(f"--keep must leave between 1 and {SIDE - 1} rows of {SIDE}: got {args.keep}")
    if not args.temperature > 0.0:
        raise UsageError(f"--temperature must be greater than 0: got {args.temperature}")
    arguments.check_checkpoint(args.path, "--path")


def run(args: argparse.Namespace) -> int:
    """Draw, complete, and write the grid."""
    import torch
    from fairseq import checkpoint_utils

    check(args)
    overrides = {"data": args.data, "tokens_per_sample": TOKENS, "sample_break_mode": "eos"}
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([args.path], arg_overrides=overrides)
    model = models[0]
    model.prepare_for_inference_(cfg)
    model.eval()
    symbols_K = colour_symbols(task.target_dictionary)
    start = start_symbols(task)
    torch.manual_seed(args.seed)
    pictures: list[Tensor] = []
    if args.complete:
        originals = given_images(task, args.gen_subset, args.complete)
        given = round(args.keep * SIDE) * SIDE * 3
        finished = drawn(model, originals[:, :given], symbols_K, args, start)
        pictures += [picture for pair in zip(originals, finished) for picture in pair]
    if args.count:
        pictures += list(drawn(model, torch.empty(args.count, 0, dtype=torch.long), symbols_K, args, start))
    write_grid([colours(picture, symbols_K) for picture in pictures], args.png, args.columns, args.scale)
    print(f"{args.count} images drawn, {args.complete} completed from {args.gen_subset}: {args.png}")
    return 0


def colour_symbols(dictionary: Dictionary) -> Tensor:
    """(256,) the dictionary's index of every colour value; ``UsageError`` for a dictionary of something else."""
    import torch

    from fairseq_ms.errors import UsageError

    found = [dictionary.index(str(value)) for value in range(256)]
    if dictionary.unk() in found or len(dictionary) != 256 + dictionary.nspecial:
        raise UsageError(f"data must be images, with the 256 colour values for symbols: got {len(dictionary)} symbols")
    return torch.tensor(found)


def start_symbols(task: FairseqTask) -> list[int]:
    """What stands before the first colour of every image in training."""
    bos = [task.source_dictionary.bos()] if getattr(task.args, "add_bos_token", False) else []
    return [*bos, task.source_dictionary.eos()]


def given_images(task: FairseqTask, split: str, count: int) -> Tensor:
    """(count, 3072) tokens of the first images of a split."""
    import torch

    from fairseq_ms.errors import UsageError

    try:
        task.load_dataset(split)
    except FileNotFoundError as error:
        raise UsageError(f"--gen-subset must be one of the data's splits: there is no {split!r}") from error
    dataset = task.dataset(split)
    if len(dataset) < count:
        raise UsageError(f"--complete must be at most the {len(dataset)} images of {split!r}: got {count}")
    bos = len(start_symbols(task)) - 1
    images = [dataset[index]["target"][bos:] for index in range(count)]
    if any(image.numel() != TOKENS for image in images):
        raise UsageError(f"data must have {TOKENS} tokens an image: got {images[0].numel()}")
    return torch.stack(images)


def drawn(
    model: FairseqLanguageModel, given_BT: Tensor, symbols_K: Tensor, args: argparse.Namespace, start: list[int]
) -> Tensor:
    """Continue images of which T tokens are given behind ``start``, in batches; (B, T) to (B, 3072) tokens."""
    import torch
    from tqdm import tqdm

    total = (TOKENS - given_BT.shape[1]) * -(-given_BT.shape[0] // args.batch_size)
    with torch.no_grad(), tqdm(total=total, unit=" tokens", desc="drawing") as bar:
        parts = [
            continued(model, part, symbols_K, args.temperature, bar, start) for part in given_BT.split(args.batch_size)
        ]
    return torch.cat(parts)


def continued(
    model: FairseqLanguageModel, given_BT: Tensor, symbols_K: Tensor, temperature: float, bar: tqdm, start: list[int]
) -> Tensor:
    """One batch of ``drawn``: all that is given in one pass, and one cached step for each token that is drawn."""
    import torch

    decoder = model.decoder
    start_BT = torch.tensor(start).repeat(given_BT.shape[0], 1)
    tokens_BT = torch.cat([start_BT, given_BT], dim=1)
    state: dict[str, object] = {}
    while tokens_BT.shape[1] < len(start) + TOKENS:
        logits_BK = decoder(tokens_BT, incremental_state=state)[0][:, -1, symbols_K] / temperature
        picked_B1 = torch.multinomial(logits_BK.softmax(dim=1), 1)
        tokens_BT = torch.cat([tokens_BT, symbols_K[picked_B1]], dim=1)
        bar.update()
    return tokens_BT[:, len(start) :]


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
    os.replace(partial, path)
