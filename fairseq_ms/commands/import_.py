"""Write the model of a fairseq transformer_lm or a transformers folder as a checkpoint of this package."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_ms.tools import arguments

if TYPE_CHECKING:
    from fairseq_ms.importing.source import Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "file of fairseq-train (a transformer_lm or vanilla_lm), or folder of transformers with a config.json"
    parser.add_argument("source", type=arguments.place, metavar="SOURCE", help=help)
    help = "folder to write: the checkpoint, its dictionary, and finetune.yaml for fairseq-ms train"
    parser.add_argument("out", metavar="OUT", type=Path, help=help)
    help = "give the heads windows, in their order, such as 1x=0:512 or 1x=0:8*4,1x=0:*4: the model is a retina_lm"
    parser.add_argument("--scale-windows", metavar="WINDOWS", help=help)
    help = "folder with the dict.txt of a fairseq model (default: beside it, or where it was trained)"
    parser.add_argument("--data", type=Path, help=help)


def run(args: argparse.Namespace) -> None:
    arguments.register()
    from fairseq_ms.errors import UsageError
    from fairseq_ms.importing import fairseq_models, hf_models
    from fairseq_ms.importing.source import CHECKPOINT

    if args.scale_windows == "":
        raise UsageError("--scale-windows must be windows, such as 1x=0:512: got ''")
    path = Path(args.source)
    if (path / "config.json").is_file():
        if args.data is not None:
            raise UsageError(f"--data must be left out with a folder, which has its own tokens: got {args.data}")
        source = hf_models.read(path, args.scale_windows)
    elif path.is_dir() and not any(path.glob("*.pt")):
        raise UsageError(
            f"SOURCE must be a checkpoint, or a folder of transformers with a config.json: {path} has none"
        )
    else:
        arguments.check_checkpoint(args.source, "SOURCE")
        source = fairseq_models.read(path, args.data, args.scale_windows)
    ours = source.write(args.out, {"finetune.yaml": finetuning(source, args.out)})
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    dtype = str(next(ours.parameters()).dtype).removeprefix("torch.")
    print(f"{args.out}: {source.arch}, {parameters:,} parameters, {dtype}")
    out = shlex.quote(str(args.out))
    if "tokenizer.json" in source.files:
        print(f"next: fairseq-ms prepare text --input FOLDER --bpe hf_byte_bpe --vocab-from {out} --out DATA")
    else:
        print(f"next: fairseq-ms perplexity {shlex.quote(str(args.out / CHECKPOINT))} --data DATA")


def finetuning(source: Source, out: Path) -> str:
    """A configuration for ``fairseq-ms train`` that begins with the model."""
    import yaml

    from fairseq_ms.commands import config
    from fairseq_ms.importing.source import CHECKPOINT
    from fairseq_ms.presets.registry import Preset, Recipe

    adaptive = bool(source.flags.get("adaptive_softmax_cutoff"))
    recipe = Recipe(
        "",
        {
            "checkpoint": {"finetune_from_model": str(out.absolute() / CHECKPOINT)},
            "task": {"_name": "language_modeling", **source.task},
            "dataset": {"batch_size": 2},
            "criterion": {"_name": "adaptive_loss" if adaptive else "cross_entropy"},
            "optimization": {"max_update": "???", "lr": [1e-4], "clip_norm": 1.0},
            "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.95)"},
            "lr_scheduler": {"_name": "cosine", "warmup_updates": 50},
        },
    )
    values = {name: value for name, value in source.flags.items() if value is not None}
    sections = config.settings(Preset(out.name, source.arch, "", values, recipe))
    comment = "# fairseq-ms train THIS --data DATA --max-update N goes on with the model; the rate is a first guess.\n"
    return comment + str(yaml.safe_dump(sections, sort_keys=False))
