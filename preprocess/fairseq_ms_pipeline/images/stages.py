"""Images to fairseq's binarised form: a token for each colour value, a sentence of 3,072 tokens for each
image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from fairseq_ms_pipeline import binarise, halves
from fairseq_ms_pipeline.dataset import SPLITS, Dataset
from fairseq_ms_pipeline.documents import Draw
from fairseq_ms_pipeline.files import Json, read_json, write_json
from fairseq_ms_pipeline.images.read import TOKENS, given_split
from fairseq_ms_pipeline.progress import Progress
from fairseq_ms_pipeline.run import in_work_folder
from fairseq_ms_pipeline.shards import INDEX

SHARD_IMAGES = 2048
COLOURS = 256
DATASET = Dataset("images", "Images")


@dataclass(frozen=True)
class ImageJob:
    """One run: where images come from (a function that tells of bytes read), how they are split, where they go."""

    source: Callable[[Callable[[int], object]], Iterable[tuple[str, np.ndarray]]]
    source_bytes: int | None
    names: tuple[str, ...]
    out: Path
    settings: Json
    valid_fraction: float
    test_fraction: float
    seed: int
    quiet: bool = False


def splits(job: ImageJob, found: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Each file's images by split: named splits as they are, what is missing drawn from the training images."""
    named = {given_split(name) for name in job.names}
    valid_fraction = 0.0 if "valid" in named else job.valid_fraction
    test_fraction = 0.0 if "test" in named else job.test_fraction
    draw = Draw(replace(DATASET, valid_fraction=valid_fraction, test_fraction=test_fraction), job.seed)
    for name, images_BT in found:
        split = given_split(name)
        if split:
            yield split, images_BT
            continue
        drawn_B = np.array([SPLITS.index(draw.split_of(name)) for _ in range(len(images_BT))])
        for index, drawn in enumerate(SPLITS):
            if (drawn_B == index).any():
                yield drawn, images_BT[drawn_B == index]


def run(job: ImageJob) -> Json:
    """Prepare the images and return the manifest; a finished folder is left as it is. ValueError for bad input."""
    progress = Progress(2, job.quiet)
    return in_work_folder(DATASET, job.out, job.settings, progress, partial(_stages, job, progress), INDEX)


def _stages(job: ImageJob, progress: Progress, work: Path) -> Json:
    ready, shards = work / "ready", work / "shards"
    shards.mkdir(exist_ok=True)
    with progress.stage("read", job.source_bytes) as bar:
        if not (work / INDEX).exists():
            write_json(work / INDEX, _write_shards(splits(job, job.source(bar.update)), shards))
    found = read_json(work / INDEX)
    with progress.stage("publish", sum(len(names) for names in found.values()), " shards") as bar:
        dictionary_path = ready / "bin" / "dict.txt"
        binarise.write_fixed_dictionary([str(colour) for colour in range(COLOURS)], dictionary_path)
        counts = {}
        for split, names in found.items():
            binarise.merge([shards / name for name in names], ready / "bin" / split)
            count = sum(read_json(shards / f"{name}.json")["images"] for name in names)
            counts[split] = {"images": count, "targets": count * TOKENS, "unknown": 0, "bytes": count * TOKENS}
            bar.update(len(names))
        halves.write_halves(ready)
        return {"vocabulary": {"types": COLOURS, "dictionary_size": COLOURS + 4}, "splits": counts}


def _write_shards(parts: Iterable[tuple[str, np.ndarray]], folder: Path) -> dict[str, list[str]]:
    """Write shards of SHARD_IMAGES images for each split, passing over those that an interrupted run has finished."""
    waiting: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    names: dict[str, list[str]] = {split: [] for split in SPLITS}

    def flush(split: str, images_BT: np.ndarray) -> None:
        name = f"{split}-{len(names[split]):06d}"
        if not (folder / f"{name}.json").exists():
            # Symbols 0 to 3 are fairseq's own. No end of line: every sample is one image of 3,072 tokens.
            ids = images_BT.astype(np.int32).ravel() + 4
            binarise.write_shard(ids, [TOKENS] * len(images_BT), folder / name, COLOURS + 4)
            write_json(folder / f"{name}.json", {"images": len(images_BT)})
        names[split].append(name)

    for split, images_BT in parts:
        waiting[split].append(images_BT)
        if sum(map(len, waiting[split])) >= SHARD_IMAGES:
            joined = np.concatenate(waiting[split])
            whole = len(joined) - len(joined) % SHARD_IMAGES
            for start in range(0, whole, SHARD_IMAGES):
                flush(split, joined[start : start + SHARD_IMAGES])
            waiting[split] = [joined[whole:]] if whole < len(joined) else []
    for split, rest in waiting.items():
        if rest:
            flush(split, np.concatenate(rest))
    empty = [split for split, shards in names.items() if not shards]
    if empty:
        raise ValueError(f"--input has no images for the split {' or '.join(empty)}: give it files, or a larger share.")
    return names
