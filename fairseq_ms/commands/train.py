"""Train what a configuration of fairseq-ms config says, or a preset, and show how it goes."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import fairseq_ms
from fairseq_ms.commands import config
from fairseq_ms.errors import UsageError
from fairseq_ms.presets.registry import CONFIGS
from fairseq_ms.tools import arguments

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Of what fairseq logs, who says what a user follows: losses, unless a bar does, and what this package has to say.
_SHOWN, _LOSSES = "fairseq_ms", ("train", "train_inner", "valid")
_LINES = ("Loaded checkpoint", "early stop", "Stopping training due to cumulative")
_NOT_SHOWN = ("Saving checkpoint", "Finished saving")
# Settings by which a preset's epoch, dropout and intervals are others.
_LENGTHS = ("dataset.batch_size", "task.tokens_per_sample", "optimization.update_freq", "optimization.max_update")
# Of the time of training, that of validations; scoring a token takes a third of the time that training on it does.
_VALIDATING = 0.1 * 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} (CONFIG | PRESET --data DATA) [OPTIONS] [SECTION.NAME=VALUE ...]"
    example = "optimization.lr=[0.01] or model.dropout=0.1"
    parser.epilog = f"SECTION.NAME=VALUE is a setting in the place of the file's, such as {example}"
    help = "a file that fairseq-ms config wrote, or the name of a preset, which fairseq-ms config --list prints"
    parser.add_argument("config", metavar="CONFIG", help=help)
    # Before and after the flags.
    parser.set_defaults(fairseq_flags=[])
    help = "the folder bin/ that fairseq-ms prepare wrote (default: what the file says)"
    parser.add_argument("--data", metavar="DATA", type=Path, help=help)
    arguments.add_flag(parser, "--max-update", type=arguments.positive, metavar="N", help="as many updates instead")
    help = "print all that fairseq logs; otherwise only train.log beside the checkpoints has it"
    parser.add_argument("--verbose", action="store_true", help=help)


def run(args: argparse.Namespace) -> None:
    """Train, by ``fairseq-hydra-train``'s own function; the same command goes on where a run has stopped."""
    if flags := [text for text in args.fairseq_flags if text.startswith("-")]:
        near = _settings_of(flags[0]) or difflib.get_close_matches(flags[0], ("--data", "--max-update", "--verbose"), 1)
        hint = f": did you mean {near[0]}?" if near else ", which takes fairseq's as settings, SECTION.NAME=VALUE"
        raise UsageError(f"{flags[0]} is no flag of train{hint}")
    written = _written(args)
    arguments.register()
    logging.getLogger("fairseq").setLevel(logging.NOTSET)
    cfg = composed(written, args.fairseq_flags)
    from fairseq_cli.hydra_train import _hydra_main
    from omegaconf import open_dict

    save_dir = cfg.checkpoint.save_dir
    with open_dict(cfg):
        cfg.valid_tokens, cfg.screen = valid_tokens(cfg), not args.verbose
        cfg.job_logging_cfg = _logging(None if cfg.checkpoint.no_save else Path(save_dir, "train.log"), args.verbose)
    _choose_threads(cfg.model)
    with patch.object(sys, "argv", ["fairseq-ms train", *sys.argv[2:]]):
        _hydra_main(cfg)
    best = next(
        (file for name in ("best", "last") if (file := Path(save_dir, f"checkpoint_{name}.pt")).is_file()), None
    )
    if best is not None and int(os.environ.get("RANK", 0)) == 0:
        print(said_of(best, cfg))


def valid_tokens(cfg: DictConfig) -> int | None:
    """How many tokens a validation may read to take a tenth of the time; None where that is not known before."""
    intervals = cfg.dataset.validate_interval_updates, cfg.checkpoint.save_interval_updates
    row, rows = cfg.task.get("tokens_per_sample"), cfg.dataset.batch_size
    if not any(intervals) or not row or not rows:
        return None
    return int(_VALIDATING * min(filter(None, intervals)) * rows * row * cfg.optimization.update_freq[0])


def said_of(model: Path, cfg: DictConfig) -> str:
    """Where a trained model is and what comes next, by its kind: what writes needs text, and the next token."""
    from fairseq import utils

    from fairseq_ms.tools import tokenizing

    path = shlex.quote(os.path.relpath(model))
    said = f"the model is {path}\nnext: fairseq-ms perplexity {path}"
    if cfg.criterion._name == "in_batch_sampled_softmax" or cfg.model._name == "coarse_lm":
        return f"the model is {path}\nnext: fairseq-ms --help lists analyses by what they are for"
    try:
        tokenizing.pipeline_of(Path(utils.split_paths(cfg.task.data)[0]), None, None, None, None)
    except UsageError:
        return said
    return f"{said}\n      fairseq-ms sample {path} --prompt TEXT"


def _settings_of(flag: str) -> list[str]:
    """The settings that fairseq's commands take as this flag, but for those of a model, a task and the like."""
    arguments.register()
    from fairseq.dataclass.configs import FairseqConfig

    name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
    sections = FairseqConfig.__dataclass_fields__.items()
    return [
        f"{section}.{name}=VALUE"
        for section, field in sections
        if name in getattr(field.type, "__dataclass_fields__", ())
    ]


def _written(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the file or preset, with the flags', before fairseq is loaded."""
    path = Path(args.config)
    if args.config in CONFIGS and not path.is_file():
        if args.data is None:
            raise UsageError(f"--data must be given with a preset: got {args.config} alone")
        others = _lengths(args.fairseq_flags)
        updates = others.get("optimization", {}).pop("max_update", args.max_update)
        return config.settings(CONFIGS[args.config], args.data, updates, others=others)
    if not path.is_file():
        beside = [str(file) for file in (Path(f"{path}.yaml"), Path("configs", f"{path.name}.yaml")) if file.is_file()]
        near = beside or difflib.get_close_matches(args.config, CONFIGS, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(
            f"CONFIG must be a file or a preset that fairseq-ms config --list names: got {args.config}{hint}"
        )
    import yaml

    try:
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"CONFIG must be YAML: {path} is not ({' '.join(str(error).split())})") from None
    sections = isinstance(written, dict) and all(isinstance(section, dict) for section in written.values())
    if not sections or "model" not in written or "defaults" in written:
        raise UsageError(
            f"CONFIG must have sections of settings, and a model, as fairseq-ms config writes it: {path} has not "
            "(fairseq-hydra-train composes other files)"
        )
    if args.data is not None:
        task = written.setdefault("task", {})
        before = Path(str(task.get("data")))
        half = before.name if before.parent.name == "halves" else ""
        task["data"] = str(config.half_of(args.data.absolute(), half))
    if args.max_update is not None:
        written.setdefault("optimization", {})["max_update"] = args.max_update
    return written


def _lengths(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of SECTION.NAME=VALUE those that say how long an epoch and a run are, where they can be."""
    found = dict[str, dict[str, Any]]()
    for text in overrides:
        key, _, given = text.lstrip("+").partition("=")
        try:
            value = json.loads(given)
        except ValueError:
            continue
        counts = value if isinstance(value, list) and key == "optimization.update_freq" else [value]
        if key in _LENGTHS and counts and all(type(count) is int and count > 0 for count in counts):
            section, _, name = key.partition(".")
            found.setdefault(section, {})[name] = value
    return found


def composed(written: Mapping[str, Any], overrides: Sequence[str]) -> DictConfig:
    """What ``fairseq-hydra-train`` would make of the settings, with this package and the ways of a terminal.

    Raises UsageError, naming the setting, for one that does not exist, has another type, or is missing.
    """
    import yaml
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.dataclass.initialize import add_defaults
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    terminal = {"log_format": "simple", "log_interval": 10}
    package = {"user_dir": str(Path(fairseq_ms.__file__).parent)}
    # fairseq's own number leaves out the last rows.
    cfg: Any = OmegaConf.structured(FairseqConfig)
    cfg.dataset.required_batch_size_multiple = 1
    parts: list[tuple[str, Any]] = [("CONFIG", written), ("CONFIG", {"common": {**terminal, **package}})]
    for text in overrides:
        key, equals, _ = text.lstrip("+").partition("=")
        if not equals or text.startswith("~") or "." not in key:
            raise UsageError(f"a setting must be written SECTION.NAME=VALUE, such as model.dropout=0.1: got {text}")
        try:
            parts.append((text, OmegaConf.from_dotlist([text.lstrip("+")])))
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise UsageError(_misfit(text, error)) from error
    for said, part in parts:
        _check_names(said, part, cfg)
        try:
            cfg = OmegaConf.merge(cfg, part)
            if "_name" in (cfg.get("model") or {}):
                add_defaults(OmegaConf.create(cfg))
        except (OmegaConfBaseException, ValueError) as error:
            raise UsageError(_misfit(said, error)) from error
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        hints = {"task.data": " (--data DATA)", "optimization.max_update": " (--max-update N)"}
        raise UsageError(f"{missing[0]} must be given, since CONFIG leaves it open{hints.get(missing[0], '')}")
    return cfg


def _check_names(said: str, part: Mapping[str, Any], cfg: DictConfig) -> None:
    """Raise UsageError for names of settings, models and the like that fairseq and this package do not know.

    Settings of a model, task and the like in whose place another one is chosen are dropped from ``cfg``.
    """
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.models import MODEL_DATACLASS_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY
    from omegaconf import OmegaConf

    choices = {"model": MODEL_DATACLASS_REGISTRY, "task": TASK_DATACLASS_REGISTRY}
    choices |= {name: rows["dataclass_registry"] for name, rows in REGISTRIES.items()}
    for section, names in part.items():
        if section not in FairseqConfig.__dataclass_fields__:
            _refuse(said, "a section", section, FairseqConfig.__dataclass_fields__)
        before = OmegaConf.select(cfg, section) or {}
        own = names.get("_name") or before.get("_name") or section
        if own != section and own not in (known := choices.get(section, {})):
            _refuse(said, f"{section}._name", own, known)
        if section not in choices:
            known = set(before)
        elif (dataclass := choices[section].get(own)) is not None:
            known = {"_name", *dataclass.__dataclass_fields__}
        else:
            continue
        for name in sorted(names.keys() - known):
            _refuse(said, f"a setting of {own}", f"{section}.{name}", [f"{section}.{one}" for one in known])
        if section in choices:
            # Another choice has no settings of the one before.
            cfg[section] = {name: value for name, value in before.items() if name in known}


def _refuse(said: str, what: str, got: str, known: Iterable[str]) -> None:
    near = difflib.get_close_matches(got, known, 3)
    hint = f", such as {' or '.join(near)}" if near else ""
    raise UsageError(f"{said} must name {what} that exists{hint}: {got} does not")


def _misfit(said: str, error: Exception) -> str:
    """The sentence for a value of the wrong kind."""
    first, *rest = str(error).splitlines()
    key = next((line.split(": ")[1] for line in rest if line.strip().startswith("full_key")), "")
    if "ListConfig" in first:
        first = f"it is a list, as in {key or said.partition('=')[0]}=[0.1]"
    return f"{said}{f', {key},' if said == 'CONFIG' and key else ''} must have a value that fits ({first})"


def _logging(file: Path | None, verbose: bool) -> dict[str, Any]:
    """What ``logging.config`` wants: everything goes to a file, and the terminal shows what is followed."""
    shown = [] if verbose else ["followed"]
    terminal = {"class": f"{__name__}.Terminal", "formatter": "plain", "filters": shown, "stream": "ext://sys.stdout"}
    handlers: dict[str, Any] = {"terminal": terminal}
    if file is not None:
        name = f"{__name__}.LogFile"
        handlers["file"] = {"class": name, "formatter": "dated", "filename": str(file), "delay": True}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"followed": {"()": f"{__name__}.Followed"}},
        "formatters": {
            "plain": {"format": "%(message)s"},
            "dated": {"format": "%(asctime)s | %(levelname)s | %(name)s | %(message)s"},
        },
        "handlers": handlers,
        "root": {"level": "INFO", "handlers": list(handlers)},
    }


class Followed(logging.Filter):
    """Lets through warnings, what this package says, and losses where no bar shows them."""

    def filter(self, record: logging.LogRecord) -> bool:
        from fairseq_ms.host.screen import screens

        text, name = record.getMessage(), record.name.partition(".")[0]
        own = (name == _SHOWN or (name in _LOSSES and not screens)) and not text.startswith(_NOT_SHOWN)
        return own or record.levelno >= logging.WARNING or text.startswith(_LINES)


class Terminal(logging.StreamHandler):
    """A log above a progress bar, on lines of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        with tqdm.external_write_mode(self.stream):
            super().emit(record)


class LogFile(logging.FileHandler):
    """A log in the folder of a run, which is made when there is something to write."""

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


def _choose_threads(model: DictConfig) -> None:
    """On a CPU, as many threads as the model's width keeps busy, unless OMP_NUM_THREADS says how many."""
    import torch

    width = model.get("decoder_embed_dim")
    if "OMP_NUM_THREADS" not in os.environ and width and not torch.cuda.is_available():
        torch.set_num_threads(min(torch.get_num_threads(), max(1, int(width) // 64)))
