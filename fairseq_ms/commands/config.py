"""Print a preset, with its paper's recipe for training, as a configuration for fairseq-hydra-train."""

from __future__ import annotations

import argparse
import difflib
import json
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import fairseq_ms
from fairseq_ms.errors import UsageError, bin_hint
from fairseq_ms.presets.recipes import LONG
from fairseq_ms.presets.recipes import SOURCE as OWN
from fairseq_ms.presets.registry import CONFIGS, Preset
from fairseq_ms.tools import arguments, report

SIZES = Path(fairseq_ms.__file__).parent / "presets" / "sizes.json"
"""[symbols, parameters, bytes a training step keeps for each target] by preset; ``make sizes`` writes it."""
# Of models, after those for long texts: README's.
_ORDER = (
    *("retina_lm", "multiscale_topdown", "multiscale_bottomup", "coarse_lm"),
    *("transformer_ql", "transformer_xl", "compressive_transformer", "haed", "hred", "vanilla_lm"),
)

# Updates between two checkpoints at least, and epochs, of which there will not be as many.
_SHORTEST, _NEVER = 10, 1_000_000
# Above so many passes, models of one's own text that have no dropout are given this much.
_MANY_PASSES, _DROPOUT = 4, 0.1
# The sections of a file in their order, with what every recipe has in common; "???" must be given on the command line.
_SHARED: dict[str, dict[str, object]] = {
    "common": {"user_dir": "fairseq_ms", "seed": 1, "log_format": "simple", "log_interval": 100},
    "checkpoint": {"no_epoch_checkpoints": True, "save_interval_updates": 1000, "keep_interval_updates": 1},
    "distributed_training": {},
    "task": {"data": "???"},
    "dataset": {"num_workers": 2, "required_batch_size_multiple": 1},
    "criterion": {},
    "optimization": {},
    "optimizer": {},
    "lr_scheduler": {},
    "model": {},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = (
        "a preset, as --arch names it, or a run of HAED such as characters_iem: characters_* or pixels_* with "
        "hred, hred_transformer, haed, iem, finetune or end_to_end"
    )
    parser.add_argument("preset", metavar="PRESET", nargs="?", help=help)
    help = "print our own presets: parameters, memory of a step, and where they are from"
    parser.add_argument("--list", action="store_true", help=help)
    parser.add_argument("--papers", action="store_true", help="with --list: and every row of the papers' tables")
    help = "print the flags of an architecture, which are the settings of its file's section model, too"
    parser.add_argument("--flags", metavar="ARCH", help=help)
    help = "write a file, such as configs/NAME.yaml, whose checkpoints go to checkpoints/NAME"
    parser.add_argument("--out", metavar="FILE", type=Path, help=help)
    help = (
        "the folder bin/ that fairseq-ms prepare wrote: goes into the file, of a phase of HAED as its half of the "
        "training data, with one epoch's number of updates where the paper trains for one; paths of the plugin and of "
        "the checkpoints, below this folder, are then absolute"
    )
    parser.add_argument("--data", metavar="DATA", type=Path, help=help)
    arguments.add_flag(parser, "--max-update", "--updates", type=int, metavar="N", help="as many updates instead")
    help = "other windows of a retina_lm or vanilla_lm, such as 1x=0:8*2,1x=0:512*6, in rows as long as before"
    parser.add_argument("--scale-windows", metavar="WINDOWS", help=help)


def run(args: argparse.Namespace) -> None:
    """Print or write the file, or print the presets."""
    if (args.preset is not None) + args.list + (args.flags is not None) != 1:
        raise UsageError(f"PRESET or --list must be given, or --flags, and one alone: got {args.preset or 'none'}")
    if args.papers and not args.list:
        raise UsageError("--papers must be given with --list: got it alone")
    for flag, given in {"--out": args.out, "--data": args.data}.items():
        if given is not None and args.preset is None:
            raise UsageError(f"{flag} must be given with PRESET: got {given} without one")
    if args.list:
        shown = [preset for preset in CONFIGS.values() if args.papers or preset.recipe.source == OWN]
        print(listed(shown), "next: fairseq-ms config PRESET --data DATA --out configs/mine.yaml", sep="\n")
        return
    if args.flags is not None:
        print(flags_of(args.flags))
        return
    if presets := [name for name, preset in CONFIGS.items() if preset.model == args.preset != name]:
        raise UsageError(
            f"PRESET must be a preset: {args.preset} is an architecture, whose presets are {', '.join(presets)}"
        )
    if args.preset not in CONFIGS:
        close = difflib.get_close_matches(args.preset, CONFIGS, 3) or ["retina_lm_wt103_16"]
        raise UsageError(f"PRESET must be one such as {' or '.join(close)}: got {args.preset!r}")
    if args.max_update is not None and args.max_update < 1:
        raise UsageError(f"--max-update must be at least 1: got {args.max_update}")
    preset = CONFIGS[args.preset]
    if args.scale_windows is not None:
        preset = _with_windows(preset, args.scale_windows)
    name = args.out.stem if args.out else preset.name
    text = config_text(preset, settings(preset, args.data, args.max_update, name), name)
    if args.out is None:
        print(text, end="")
        return
    if args.out.is_dir():
        raise UsageError(f"--out must name a file: {args.out} is a folder")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Processes of one training may write it at once, and none must read the half of it.
    report.write_text(args.out, text)
    where = shlex.quote(str(args.out))
    data = "" if args.data is not None else " --data DATA"
    print(f"{args.out}: {preset.name}, whose checkpoints go to checkpoints/{name}")
    print(f"next: fairseq-ms train {where}{data}")


def _with_windows(preset: Preset, windows: str) -> Preset:
    """The preset with other windows; UsageError where it has none, or these do not fit its heads and layers."""
    if preset.model not in ("retina_lm", "vanilla_lm"):
        raise UsageError(f"--scale-windows must be for a retina_lm or vanilla_lm: got {preset.name}")
    arguments.register()
    from fairseq_ms.tools import untrained

    untrained.build(["--arch", preset.name, f"--scale-windows={windows}"], 100, device="meta")
    return replace(preset, values={**preset.values, "scale_windows": windows})


def flags_of(arch: str) -> str:
    """The flags of an architecture's model as a table: default and meaning."""
    arguments.register()
    from dataclasses import MISSING

    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY

    model, known = ARCH_MODEL_NAME_REGISTRY.get(arch), {preset.model for preset in CONFIGS.values()}
    if model not in known:
        raise UsageError(f"--flags must name an architecture, {', '.join(sorted(known))}, or a preset: got {arch}")
    rows = []
    for name, field in MODEL_DATACLASS_REGISTRY[model].__dataclass_fields__.items():
        # Others are a task's or criterion's, by interpolation.
        if text := field.metadata.get("help"):
            default = field.default_factory() if field.default is MISSING else field.default
            first, *more = textwrap.wrap(" ".join(text.split()), 64, break_on_hyphens=False)
            rows.append([f"--{name.replace('_', '-')}", getattr(default, "value", default), first])
            rows += [["", "", line] for line in more]
    return report.format_table(["flag", "default", "meaning"], rows)


def listed(presets: Iterable[Preset]) -> str:
    """The presets as a table: parameters, memory of a training step, and where the paper reports them."""
    sizes = json.loads(SIZES.read_text(encoding="utf-8"))
    rows, papers = [], list[str]()
    order = lambda preset: (preset.table != LONG, (*_ORDER, preset.model).index(preset.model))  # noqa: E731
    for preset in sorted(presets, key=order):
        symbols, parameters, kept = sizes.get(preset.name, (None, None, None))
        paper = preset.recipe.source.partition(" of ")[2] or preset.recipe.source
        papers += [paper] if paper not in papers else []
        table = f"[{papers.index(paper) + 1}] {preset.table}"
        millions, kilobytes = parameters and round(parameters / 1e6, 1), kept and round(kept / 1e3, 1)
        rows.append([preset.name, symbols, millions, kilobytes, table])
    notes = [
        *(f"[{number}] {paper}" for number, paper in enumerate(papers, 1)),
        "kB a target: what a training step keeps for its backward pass in single precision, with --criterion "
        "cross_entropy;",
        "-: it depends on the text, and fairseq-ms memory --arch PRESET measures it",
    ]
    table = report.format_table(["preset", "symbols", "parameters (M)", "kB a target", "reported in"], rows)
    return "\n".join([table, "", *notes])


def settings(
    preset: Preset,
    data: Path | None = None,
    updates: int | None = None,
    name: str = "",
    others: Mapping[str, Mapping[str, object]] | None = None,
) -> dict[str, dict[str, object]]:
    """All settings of a preset by section; the length of a segment belongs to the task, as fairseq has it.

    Args:
        preset: whose.
        data: fairseq's data folder, of which the preset may want one half.
        updates: how many; as the preset has it when None, or one epoch of the data.
        name: of the folder of its checkpoints; that of the preset when "".
        others: settings in the place of the preset's, such as those that decide how long an epoch is.
    """
    name = name or preset.name
    sections = {key: {**preset.recipe.settings.get(key, {}), **shared} for key, shared in _SHARED.items()}
    assert preset.recipe.settings.keys() <= sections.keys(), preset.name
    sections["checkpoint"]["save_dir"] = f"checkpoints/{name}"
    values = dict(preset.values)
    if "tokens_per_sample" in values:
        sections["task"]["tokens_per_sample"] = values.pop("tokens_per_sample")
    sections["model"] = {"_name": preset.model, **sections["model"], **values}
    for section, own in (others or {}).items():
        sections[section] |= own
    if data is not None:
        folder = half_of(data.absolute(), preset.recipe.half)
        sections["task"]["data"] = str(folder)
        # fairseq-hydra-train changes the folder before it reads paths.
        sections["common"]["user_dir"] = str(Path(fairseq_ms.__file__).parent)
        sections["checkpoint"]["save_dir"] = str(Path("checkpoints", name).absolute())
        if updates is None and sections["optimization"]["max_update"] == "???":
            updates = _one_epoch(folder, sections)
    if updates is not None:
        sections["optimization"]["max_update"] = updates
    if preset.recipe.source == OWN and isinstance(most := sections["optimization"]["max_update"], int):
        # Validated and saved twenty times, however long an epoch is.
        interval = max(_SHORTEST, -(-most // 20))
        sections["checkpoint"] |= {"save_interval_updates": interval, "save_interval": _NEVER}
        sections["dataset"]["validate_interval"] = _NEVER
        free = data is not None and preset.values.get("dropout") == 0
        if free and most > _MANY_PASSES * _an_epoch(Path(str(sections["task"]["data"])), sections):
            sections["model"]["dropout"] = _DROPOUT
    return {key: section for key, section in sections.items() if section}


def half_of(data: Path, half: str) -> Path:
    """The folder of a half of the training data, "first" or "second", or with "" of all of it; or a half itself."""
    folder = data.parent / "halves" / half if half and data.parent.name != "halves" else data
    if not (folder / "train.idx").is_file():
        beside = f"have halves/{half} beside it, as fairseq-ms prepare writes it"
        wanted = beside if half else "be a data folder of fairseq's"
        raise UsageError(f"--data must {wanted}: {folder}/train.idx is missing{bin_hint(data)}")
    return folder


def _one_epoch(folder: Path, sections: dict[str, dict[str, object]]) -> int:
    """How many updates one epoch takes; UsageError where they are fewer than those of the warm-up of a part."""
    count = _an_epoch(folder, sections)
    groups = sections["optimizer"].get("groups", {})
    assert isinstance(groups, dict)
    warmup = max((group["lr_scheduler"]["warmup_updates"] for group in groups.values()), default=0)
    if count <= warmup:
        raise UsageError(
            f"--data must have more batches than the {warmup} updates of warm-up, unless --max-update says how many "
            f"to make: got {count} in {folder}"
        )
    return count


def _an_epoch(folder: Path, sections: dict[str, dict[str, object]]) -> int:
    """Updates of an epoch of a folder's training data."""
    task, batch = sections["task"], int(str(sections["dataset"]["batch_size"]))
    row, mode = int(str(task["tokens_per_sample"])), str(task["sample_break_mode"])
    accumulated = sections["optimization"].get("update_freq") or [1]
    assert isinstance(accumulated, list)
    try:
        return updates_of_an_epoch(folder / "train", row, mode, batch * accumulated[0])
    except (ValueError, OSError) as error:
        raise UsageError(f"--data must be as fairseq-ms prepare writes it: {error}") from error


def updates_of_an_epoch(split: Path, tokens: int, break_mode: str, rows: int) -> int:
    """Updates of one epoch, read from the index of the data at a path without .bin and .idx.

    Args:
        tokens: of a row, T
        break_mode: fairseq's ``--sample-break-mode``: "none", rows of T tokens each, or "eos", a row a sentence
        rows: of an update, over all processes and accumulated gradients
    """
    from fairseq_ms_pipeline import indexed

    assert break_mode in ("none", "eos"), break_mode
    _, lengths, _ = indexed.read_index(split.with_name(f"{split.name}.idx"))
    count = len(lengths) if break_mode == "eos" else -(-int(lengths.sum(dtype="int64")) // tokens)
    return -(-count // rows)


def config_text(preset: Preset, given: dict[str, dict[str, object]] | None = None, name: str = "") -> str:
    """The YAML of a preset, with a comment that says where it comes from and how it is used.

    ``given`` are the settings to write, where they are not those of the preset alone, and ``name`` that of the file.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        """Lists on one line."""

    Dumper.add_representer(
        list, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, True)
    )
    words = f"{preset.name}: {preset.table}, trained as in {preset.recipe.source}."
    name = name or preset.name
    commands = [
        f"#   fairseq-ms config {preset.name} --out configs/{name}.yaml",
        f"#   fairseq-hydra-train --config-dir configs --config-name {name} \\",
        "#     common.user_dir=$(fairseq-ms user-dir) task.data=/path/to/data-bin",
    ]
    comment = [*_comment(words), *commands, *_comment(preset.recipe.notes)]
    sections = [
        yaml.dump({name: section}, Dumper=Dumper, sort_keys=False, default_flow_style=False, width=1000)
        for name, section in (given or settings(preset)).items()
    ]
    return "\n".join(["\n".join(comment) + "\n", *sections])


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
