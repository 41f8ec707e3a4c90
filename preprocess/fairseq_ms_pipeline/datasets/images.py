"""Prepare 32 x 32 images (ImageNet-32, CIFAR-10, PNG folders and zips, two photographs) as 3,072 tokens each."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from fairseq_ms_pipeline import halves
from fairseq_ms_pipeline.cli import one_sentence, run_parser, seed_of
from fairseq_ms_pipeline.dataset import SPLITS, Dataset
from fairseq_ms_pipeline.documents import Draw
from fairseq_ms_pipeline.files import Json
from fairseq_ms_pipeline.image_files import TOKENS, WANTED, given_split, images, photographs, wanted
from fairseq_ms_pipeline.indexed import dtype_for, write_index, write_symbols
from fairseq_ms_pipeline.progress import Progress
from fairseq_ms_pipeline.run import in_work_folder
from fairseq_ms_pipeline.sources import check_inputs, identity_of, text_files, total_bytes

COLOURS = 256
# Of the training images, for a split that has no files of its own: as few for validation as will do, since they are
# missing in train, and more of two photographs.
SHARES = {"valid": 0.01, "test": 0.05}
PHOTOGRAPHS = {"valid": 0.05, "test": 0.05}


def prepare(args: argparse.Namespace) -> None:
    """Prepare the images that the flags ask for, or print what would be done.

    ValueError, in one sentence, for flags that exclude each other and for inputs that hold no such images.
    """
    given = {split: getattr(args, f"{split}_fraction") for split in SHARES}
    for split, value in given.items():
        if value is not None and not 0 < value < 0.5:
            raise ValueError(f"--{split}-fraction must lie between 0 and 0.5, not {value}.")
    if args.photographs and args.input:
        raise ValueError("--input and --photographs exclude each other: one of them says where images come from.")
    if not args.photographs:
        check_inputs(args.input)
    names = [file.name for file in text_files(args.input, wanted)]
    if not names and not args.photographs:
        where = ", ".join(map(str, args.input))
        raise ValueError(f"--input {where} holds no images ({', '.join(WANTED)}).")
    named = {given_split(name) for name in names}
    for split, value in given.items():
        if split in named and value is not None:
            raise ValueError(f"--{split}-fraction has no meaning where --input has files for {split}: leave it out.")
    if args.dry_run:
        where = "two photographs of scikit-learn" if args.photographs else f"{len(names):,} files"
        print(f"Images of {where} -> {args.out}: bin/ (fairseq), manifest.json (nothing is written by --dry-run)")
        return
    shares = PHOTOGRAPHS if args.photographs else SHARES
    chosen = {split: given[split] or shares[split] for split in SHARES}
    valid, test = (0.0 if split in named else share for split, share in chosen.items())
    dataset = Dataset("images", "Images", valid_fraction=valid, test_fraction=test)
    settings: Json = {"name": "images", "level": "image", "seed": seed_of(args)}
    settings |= {f"{split}_fraction": share for split, share in chosen.items()}
    settings["inputs"] = [*map(identity_of, args.input)] or [{"name": "photographs of scikit-learn"}]
    progress = Progress(1, args.quiet)

    def stages(work: Path) -> Json:
        with progress.stage("read", total_bytes(args.input) or None) as bar:
            found = photographs() if args.photographs else images(args.input, bar.update)
            return _write(found, Draw(dataset, seed_of(args)), work / "ready")

    in_work_folder(dataset, args.out, settings, progress, stages)


def _write(found: Iterable[tuple[str, np.ndarray]], draw: Draw, ready: Path) -> Json:
    """Write all images to their splits: those that their files' names tell of, or what is drawn of the others."""
    write_symbols(ready / "bin" / "dict.txt", {str(colour): 1 for colour in range(COLOURS)})
    counts, dtype = dict.fromkeys(SPLITS, 0), dtype_for(COLOURS + 4)
    with ExitStack() as stack:
        files = {split: stack.enter_context(open(ready / "bin" / f"{split}.bin", "wb")) for split in SPLITS}
        for name, images_BT in found:
            for image_T in images_BT:
                split = given_split(name) or draw.split_of(name)
                # Symbols 0 to 3 are fairseq's own. No end of line: every sample is one image of 3,072 tokens.
                files[split].write((image_T.astype(dtype) + dtype.type(4)).tobytes())
                counts[split] += 1
    if empty := [split for split, count in counts.items() if not count]:
        raise ValueError(f"--input has no images for the split {' or '.join(empty)}: give it files, or a larger share.")
    for split, count in counts.items():
        lengths, starts = np.full(count, TOKENS), np.arange(count) * TOKENS * dtype.itemsize
        write_index(ready / "bin" / f"{split}.idx", dtype, [lengths], [starts])
    halves.write_halves(ready)
    splits = {
        split: {"images": count, "targets": count * TOKENS, "unknown": 0, "bytes": count * TOKENS}
        for split, count in counts.items()
    }
    return {"vocabulary": {"types": COLOURS, "dictionary_size": COLOURS + 4}, "splits": splits}


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    parser = run_parser(__doc__, "bin/, manifest.json")
    parser.add_argument("--input", type=Path, nargs="+", default=[], help="files, archives or folders of images")
    parser.add_argument("--photographs", action="store_true", help="crops of scikit-learn's two photographs")
    for split, share in SHARES.items():
        share_of = f"share of the training images for {split}, if no file is (default: {share}"
        of_photographs = f", of photographs {PHOTOGRAPHS[split]}" if PHOTOGRAPHS[split] != share else ""
        parser.add_argument(f"--{split}-fraction", type=float, help=f"{share_of}{of_photographs})")
    args = parser.parse_args()
    return one_sentence(lambda: prepare(args))
