"""The command line of images: what a run makes of its flags."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fairseq_ms_pipeline.cli import one_sentence, run_parser, seed_of
from fairseq_ms_pipeline.images.read import WANTED, given_split, images, photographs, wanted
from fairseq_ms_pipeline.images.stages import ImageJob, run
from fairseq_ms_pipeline.sources import check_inputs, text_files, total_bytes

# Of the training images, for a split that has no files of its own: as few for validation as will do, since they are
# missing in train, and more of two photographs.
SHARES = {"valid": 0.01, "test": 0.05}
PHOTOGRAPHS = {"valid": 0.05, "test": 0.05}


def make_job(args: argparse.Namespace) -> ImageJob:
    """The run that the flags ask for; ValueError for flags that exclude each other, or inputs without images."""
    for split, value in (("valid", args.valid_fraction), ("test", args.test_fraction)):
        if value is not None and not 0 < value < 0.5:
            raise ValueError(f"--{split}-fraction must lie between 0 and 0.5, not {value}.")
    if args.photographs and args.input:
        raise ValueError("--input and --photographs exclude each other: one of them says where images come from.")
    shares = PHOTOGRAPHS if args.photographs else SHARES
    chosen: dict[str, Any] = {
        f"{split}_fraction": getattr(args, f"{split}_fraction") or share for split, share in shares.items()
    }
    chosen["seed"] = seed_of(args)
    settings = {"name": "images", "level": "image", **chosen}
    common = {"out": args.out, "quiet": args.quiet, **chosen}
    if args.photographs:
        settings["inputs"] = [{"name": "photographs of scikit-learn"}]
        return ImageJob(lambda advance: photographs(), None, (), settings=settings, **common)
    check_inputs(args.input)
    names = tuple(file.name for file in text_files(args.input, wanted))
    if not names:
        where = ", ".join(map(str, args.input))
        raise ValueError(f"--input {where} holds no images ({', '.join(WANTED)}).")
    named = {given_split(name) for name in names}
    for split, value in (("valid", args.valid_fraction), ("test", args.test_fraction)):
        if split in named and value is not None:
            raise ValueError(f"--{split}-fraction has no meaning where --input has files for {split}: leave it out.")
    settings["inputs"] = [{"name": path.name, "bytes": total_bytes([path])} for path in args.input]
    size = total_bytes(args.input)
    return ImageJob(lambda advance: images(args.input, advance), size, names, settings=settings, **common)


def prepare(args: argparse.Namespace) -> None:
    """Run the job, or print what it would do."""
    job = make_job(args)
    if args.dry_run:
        where = "two photographs of scikit-learn" if args.photographs else f"{len(job.names):,} files"
        print(f"Images of {where} -> {job.out}: bin/ (fairseq), manifest.json (nothing is written by --dry-run)")
    else:
        run(job)


def main(description: str | None) -> int:
    """Parse the flags and prepare; returns the exit code."""
    parser = run_parser(description, "bin/, manifest.json")
    parser.add_argument("--input", type=Path, nargs="+", default=[], help="files, archives or folders of images")
    parser.add_argument("--photographs", action="store_true", help="crops of scikit-learn's two photographs")
    for split, share in SHARES.items():
        wanted = f"share of the training images for {split}, if no file is (default: {share}"
        photographs = f", of photographs {PHOTOGRAPHS[split]}" if PHOTOGRAPHS[split] != share else ""
        parser.add_argument(f"--{split}-fraction", type=float, help=f"{wanted}{photographs})")
    args = parser.parse_args()
    return one_sentence(lambda: prepare(args))
