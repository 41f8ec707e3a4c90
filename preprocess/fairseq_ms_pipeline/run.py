"""All stages in order, from a reader of lines to a published folder, resuming what an interruption left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from fairseq_ms_pipeline import binarise, bpe, halves, indexed
from fairseq_ms_pipeline import manifest as manifests
from fairseq_ms_pipeline.dataset import CODES, NUMBERED, SPLITS, Dataset
from fairseq_ms_pipeline.documents import Line
from fairseq_ms_pipeline.files import (
    Json,
    OtherFlagsNeeded,
    complete,
    complete_text,
    only_run_in,
    read_json,
    sha256_of,
    write_json,
)
from fairseq_ms_pipeline.progress import Progress
from fairseq_ms_pipeline.segment import segment_shard
from fairseq_ms_pipeline.shards import INDEX, write_shards
from fairseq_ms_pipeline.tokenise import tokenise_shard
from fairseq_ms_pipeline.workers import each

WORK = ".work"
SHARDS = f"raw/{INDEX}"
# What the files of BPE are called among the settings.
GIVEN = ("codes", "merges")
Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Job:
    """One run of the pipeline: a declaration, where it reads, where it writes, and how many processes.

    lines: gives all lines of all splits in a fixed order, and tells its argument of the bytes that it has read.
    identity: what else decides the result (the inputs' names and digests, the seed), kept in the manifest.
    vocabulary_from: a folder prepared earlier whose BPE codes and dictionary are used instead of new ones, or the
    `tokenizer.json` of Hugging Face's tokenizers, whose codes are.
    """

    dataset: Dataset
    lines: Callable[[Callable[[int], object]], Iterable[Line]]
    source_bytes: int | None
    out: Path
    workers: int
    identity: Json
    vocabulary_from: Path | None = None
    quiet: bool = False

    def check(self) -> bool:
        """Whether the folder is finished; ValueError for what cannot work, before anything is written."""
        if self.workers < 1:
            raise ValueError(f"--workers must be at least 1, not {self.workers}.")
        self.dataset.check()
        settings = self.settings()
        if self.vocabulary_from is not None:
            given = _vocabulary_files(self.vocabulary_from, self.dataset)
            if "tokenizer" in given:
                from fairseq_ms_pipeline import hf_tokenizer

                hf_tokenizer.load(given["tokenizer"])
        return check_out(self.out, settings)

    def settings(self) -> Json:
        """Everything that decides the result, in a form that JSON gives back unchanged."""
        declared = asdict(self.dataset)
        for not_deciding in ("downloads", "expected", "title"):
            del declared[not_deciding]
        given = _vocabulary_files(self.vocabulary_from, self.dataset) if self.vocabulary_from else {}
        vocabulary = {kind: sha256_of(file) for kind, file in given.items()}
        found: Json = json.loads(json.dumps(declared | self.identity | {"vocabulary_from": vocabulary}))
        return found


def _vocabulary_files(folder: Path, dataset: Dataset) -> dict[str, Path]:
    """The codes and dictionary of a prepared folder; ValueError when they are not what its manifest says.

    Of a tokenizer.json, that alone where no dictionary of its tokens lies beside it.
    """
    tokenizer = _tokenizer_in(folder)
    if tokenizer.is_file() and dataset.level not in NUMBERED:
        raise ValueError(f"--vocab-from {tokenizer} is a tokenizer.json, which needs --bpe hf_byte_bpe.")
    if (imported := is_imported(tokenizer)) or folder.is_file():
        return {"tokenizer": tokenizer, **({"dictionary": tokenizer.with_name("dict.txt")} if imported else {})}
    if not (folder / manifests.NAME).is_file():
        raise ValueError(f"--vocab-from {folder} is not a prepared folder: it has no {manifests.NAME}.")
    manifest = manifests.read(folder, "--vocab-from")
    if (theirs := manifest["settings"].get("level")) != dataset.level:
        raise ValueError(f"--vocab-from {folder} is of level {theirs}, but this run is of level {dataset.level}.")
    names = {"dictionary": "bin/dict.txt"} | dict(zip(GIVEN, CODES.get(dataset.level, ()), strict=False))
    for name in names.values():
        path = folder / name
        if not path.is_file() or sha256_of(path) != manifest["files"].get(name, {}).get("sha256"):
            raise ValueError(f"--vocab-from {folder}: {name} is missing or not the one its manifest was made with.")
    return {key: folder / name for key, name in names.items()}


def _tokenizer_in(place: Path) -> Path:
    """The `tokenizer.json` of a folder, or that which is named itself."""
    return place / "tokenizer.json" if place.is_dir() else place


def is_imported(tokenizer: Path) -> bool:
    """Whether a `tokenizer.json` has its dictionary beside it, as in a folder of `fairseq-ms import`."""
    dictionary = tokenizer.with_name("dict.txt")
    if not (tokenizer.is_file() and dictionary.is_file()):
        return False
    from fairseq_ms_pipeline import byte_bpe

    return byte_bpe.is_dictionary_of(dictionary, tokenizer)


def with_any_tokenizer(dataset: Dataset, place: Path) -> Dataset:
    """The declaration of a run with `--vocab-from`, whose tokenizer may be another than GPT-2's byte-level BPE."""
    if dataset.level != "hf_byte_bpe":
        return dataset
    any_kind = is_imported(_tokenizer_in(place))
    if place.is_file() and not any_kind:
        from fairseq_ms_pipeline.byte_bpe import codes_of

        try:
            codes_of(place)
        except ValueError:
            any_kind = True
    if (place / manifests.NAME).is_file() and not any_kind:
        any_kind = manifests.read(place, "--vocab-from")["settings"].get("level") == "hf_tokenizer"
    return replace(dataset, level="hf_tokenizer") if any_kind else dataset


def check_out(out: Path, settings: Json) -> bool:
    """Whether the folder is finished already; ValueError when it belongs to another run."""
    started = out / WORK / "plan.json"
    finished = manifests.read(out, "--out") if (out / manifests.NAME).exists() else None
    runs = [run for run in (finished, read_json(started) if started.exists() else None) if run is not None]
    for theirs in (run["settings"] for run in runs):
        for key in sorted(settings.keys() | theirs.keys()):
            there, now = theirs.get(key), settings.get(key)
            if there != now:
                difference = f"{key} is {there!r} there and {now!r} now"
                raise ValueError(f"--out {out} is of a run with other settings ({difference}): name another.")
    if finished:
        for name, facts in finished["files"].items():
            file = out / name
            if not file.is_file() or file.stat().st_size != facts["bytes"]:
                raise ValueError(f"--out {out}: {name} is missing or was changed since: name another.")
        return True
    if out.is_file():
        raise ValueError(f"--out {out} is a file: name a folder.")
    if not started.exists() and out.exists() and any(entry.name != WORK for entry in out.iterdir()):
        raise ValueError(f"--out {out} is not empty and holds no run of this tool: name another folder.")
    return False


def in_work_folder(
    dataset: Dataset, out: Path, settings: Json, progress: Progress, stages: Callable[[Path], Json]
) -> Json:
    """Run `stages` in the folder's work folder, under its lock, publish what they leave in its folder `ready`, and
    return the manifest, to which they give `vocabulary` and `splits`; a finished folder is left as it is.

    After an error that the user must mend nothing is left, unless shards say that the input was read, and the same
    command may go on.
    """
    work = out / WORK
    ready = work / "ready"
    if check_out(out, settings):
        shutil.rmtree(work, ignore_errors=True)
        manifest = read_json(out / manifests.NAME)
        print(f"{out} is prepared already.\n{manifests.last_words(manifest, out)}")
        return manifest
    is_new = not out.exists()
    ready.mkdir(parents=True, exist_ok=True)
    with only_run_in(work):
        try:
            write_json(work / "plan.json", {"settings": settings})
            if not (ready / manifests.NAME).exists():
                _remove_parts(ready)
                (ready / "bin").mkdir(exist_ok=True)
                made = stages(work)
                about = {"dataset": dataset.name, "settings": settings, "versions": manifests.versions()}
                write_json(ready / manifests.NAME, {**about, **made, "files": manifests.checksums(ready)})
            manifest = _publish(ready, out)
        except ValueError as error:
            if isinstance(error, OtherFlagsNeeded) or not (work / SHARDS).exists():
                shutil.rmtree(out if is_new else work)
            raise
        shutil.rmtree(work)
    print(f"{dataset.title} in {out}:\n{manifests.table(manifest)}\n{progress.report()}")
    for difference in manifests.differences(dataset, manifest):
        print(f"WARNING: {difference}")
    print(manifests.last_words(manifest, out))
    return manifest


def run(job: Job) -> Json:
    """Prepare the data set and return its manifest; a finished folder is left as it is.

    ValueError, in one sentence, for whatever the user can mend.
    """
    job.check()
    progress = Progress(7 if job.dataset.level in CODES else 6, job.quiet)
    return in_work_folder(job.dataset, job.out, job.settings(), progress, partial(_stages, job, progress))


def _stages(job: Job, progress: Progress, work: Path) -> Json:
    dataset = job.dataset
    raw, text, pieces, binary, ready = (work / name for name in ("raw", "text", "pieces", "binary", "ready"))
    for folder in (raw, text, pieces, binary, ready / "text"):
        folder.mkdir(exist_ok=True)
    given = _vocabulary_files(job.vocabulary_from, dataset) if job.vocabulary_from else {}
    codes = [ready / name for name in CODES.get(dataset.level, ())]
    dictionary_path = ready / "bin" / "dict.txt"

    with progress.stage("read", job.source_bytes) as bar:
        found = write_shards(job.lines(bar.update), raw, dataset)
    shards = {split: found[split]["shards"] for split in SPLITS}
    names = [name for split in SPLITS for name in shards[split]]

    def on_shards(stage: str, function: Callable[..., int], source: str, target: str, done: str, *more: object) -> None:
        """Call ``function`` for every shard that is not done, whose files are in the work folder by name."""
        todo = [name for name in names if not (work / done.format(name)).exists()]
        files = {name: (work / source.format(name), work / target.format(name)) for name in todo}
        with progress.stage(stage, sum(read.stat().st_size for read, _ in files.values())) as bar:
            for size in each(function, ((*pair, *more) for pair in files.values()), job.workers):
                bar.update(size)

    how = (dataset.tokenise, dataset.language, dataset.level)
    on_shards("tokenise", tokenise_shard, "raw/{}.txt", "text/{}.txt", "text/{}.txt", *how)
    for name in names:
        (raw / f"{name}.txt").unlink(missing_ok=True)

    if dataset.level in NUMBERED:
        from fairseq_ms_pipeline import byte_bpe, hf_tokenizer

    if codes:
        sampled = bpe.sample([text / f"{name}.txt" for name in shards["train"]], dataset.bpe_sample_bytes)
        # Of byte-level BPE the merges are learnt in one step, after all words are counted.
        of_bytes = dataset.level == "hf_byte_bpe"
        counted = sum(shard.stat().st_size for shard in sampled) if of_bytes else dataset.bpe_merges
        with progress.stage("learn BPE", counted, "B" if of_bytes else " merges") as bar:
            merges = dataset.bpe_merges
            if "tokenizer" in given and dataset.level == "hf_tokenizer":
                _copy(given["tokenizer"], codes[0])
            elif "tokenizer" in given:
                for target, learnt in zip(codes, byte_bpe.codes_of(given["tokenizer"]), strict=True):
                    with complete_text(target) as file:
                        file.write(learnt)
            elif given:
                for kind, target in zip(GIVEN, codes, strict=False):
                    _copy(given[kind], target)
            elif all(target.exists() for target in codes):
                pass
            elif of_bytes:
                byte_bpe.learn(sampled, merges, ready, job.workers, bar.update)
            else:
                counters = each(bpe.word_counts, ((shard,) for shard in sampled), job.workers)
                bpe.learn(counters, dataset.bpe_sample_types, merges, codes[0], lambda loop: _ticking(loop, bar))

    more = (dataset.level, ready)
    label = f"segment ({dataset.level})"
    on_shards(label, segment_shard, "text/{}.txt", "pieces/{}.txt", "pieces/{}.json", *more)

    counts = [pieces / f"{name}.json" for name in shards["train"]]
    with progress.stage("dictionary", len(counts), " shards") as bar:
        if "dictionary" in given:
            _copy(given["dictionary"], dictionary_path)
        elif dataset.level == "hf_tokenizer":
            indexed.write_symbols(dictionary_path, dict.fromkeys(hf_tokenizer.symbols(codes[0]), 0))
        elif not dictionary_path.exists():
            every = byte_bpe.symbols(ready) if dataset.level == "hf_byte_bpe" else ()
            binarise.build_dictionary(_ticking(counts, bar), dataset.dictionary_size, dictionary_path, every)

    ending = ".npy" if dataset.level in NUMBERED else ".txt"
    words = ("text/{}" if dataset.level == "word" else "pieces/{}") + ending
    on_shards("binarise", binarise.binarise_shard, words, "binary/{}", "binary/{}.json", dictionary_path)
    for name in names:
        (pieces / f"{name}{ending}").unlink(missing_ok=True)

    with progress.stage("publish", len(names), " shards") as bar:
        for split in SPLITS:
            binarise.merge([binary / name for name in shards[split]], ready / "bin" / split)
            with complete_text(ready / "text" / f"{split}.txt") as file:
                for name in _ticking(shards[split], bar):
                    with open(text / f"{name}.txt", encoding="utf-8", newline="\n") as shard:
                        shutil.copyfileobj(shard, file, 1 << 16)
        halves.write_halves(ready)
        splits = {
            split: manifests.split_counts(shards[split], found[split]["documents"], text, binary) for split in SPLITS
        }
        return {"vocabulary": binarise.vocabulary_counts(counts, dictionary_path), "splits": splits}


def _remove_parts(folder: Path) -> None:
    """Remove what a killed run had not finished, where it would be published."""
    for part in folder.rglob("*.part-*"):
        part.unlink()


def _publish(ready: Path, out: Path) -> Json:
    """Move what is complete to its final names, the manifest last; what was moved before stays."""
    manifest = read_json(ready / manifests.NAME)
    for name in sorted({Path(file).parts[0] for file in manifest["files"]}):
        if (ready / name).exists():
            os.replace(ready / name, out / name)
    os.replace(ready / manifests.NAME, out / manifests.NAME)
    return manifest


def _copy(source: Path, target: Path) -> None:
    with complete(target) as part:
        shutil.copyfile(source, part)


def _ticking(things: Iterable[Thing], bar: tqdm) -> Iterator[Thing]:
    for thing in things:
        yield thing
        bar.update(1)
