"""`fairseq-ms config PRESET`: what a paper's recipe and a preset say, as a file for fairseq-hydra-train."""

from __future__ import annotations

import argparse
import difflib
import textwrap
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_ms.errors import UsageError

if TYPE_CHECKING:
    from fairseq_ms.lm.registry import Preset

# The sections of a file in their order, with what every recipe has in common; "???" must be given on the command line.
_SHARED: dict[str, dict[str, object]] = {
    "common": {"user_dir": "fairseq_ms", "seed": 1, "log_format": "simple", "log_interval": 100},
    "checkpoint": {"no_epoch_checkpoints": True},
    "distributed_training": {},
    "task": {"data": "???"},
    "dataset": {"num_workers": 2},
    "criterion": {},
    "optimization": {},
    "optimizer": {},
    "lr_scheduler": {},
    "model": {},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which preset, and where to write."""
    parser.add_argument(
        "preset",
        metavar="PRESET",
        help="a preset, as --arch names it, or a run of HAED such as characters_iem: characters_* or pixels_* with "
        "hred, hred_transformer, haed, iem, finetune or end_to_end",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write a file, such as configs/PRESET.yaml")


def run(args: argparse.Namespace) -> int:
    """Print or write the file."""
    from fairseq_ms.lm.registry import CONFIGS

    if args.preset not in CONFIGS:
        close = difflib.get_close_matches(args.preset, CONFIGS, 3) or ["retina_lm_wt103_16"]
        raise UsageError(f"PRESET must be one such as {' or '.join(close)}: got {args.preset!r}")
    text = config_text(CONFIGS[args.preset])
    if args.out is None:
        print(text, end="")
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Processes of one training may write it at once, and none must read the half of it.
    unfinished = args.out.with_name(f".{args.out.name}.{uuid.uuid4().hex}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(args.out)
    return 0


def settings(preset: Preset) -> dict[str, dict[str, object]]:
    """All settings of a preset by section; the length of a segment belongs to the task, as fairseq has it."""
    sections = {name: {**preset.recipe.settings.get(name, {}), **shared} for name, shared in _SHARED.items()}
    assert preset.recipe.settings.keys() <= sections.keys(), preset.name
    sections["checkpoint"]["save_dir"] = f"checkpoints/{preset.name}"
    values = dict(preset.values)
    if "tokens_per_sample" in values:
        sections["task"]["tokens_per_sample"] = values.pop("tokens_per_sample")
    sections["model"] = {"_name": preset.model, **sections["model"], **values}
    return {name: section for name, section in sections.items() if section}


def config_text(preset: Preset) -> str:
    """The YAML of a preset, with a comment that says where it comes from and how it is used."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Lists on one line."""

    Dumper.add_representer(
        list, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, True)
    )
    words = f"{preset.name}: {preset.table}, trained as in {preset.recipe.source}."
    commands = [
        f"#   fairseq-ms config {preset.name} --out configs/{preset.name}.yaml",
        f"#   fairseq-hydra-train --config-dir configs --config-name {preset.name} \\",
        "#     common.user_dir=$(fairseq-ms user-dir) task.data=/path/to/data-bin",
    ]
    comment = [*_comment(words), *commands, *_comment(preset.recipe.notes)]
    sections = [
        yaml.dump({name: section}, Dumper=Dumper, sort_keys=False, default_flow_style=False, width=1000)
        for name, section in settings(preset).items()
    ]
    return "\n".join(["\n".join(comment) + "\n", *sections])


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
