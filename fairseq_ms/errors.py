"""What users cause ends in one sentence on stderr and a non-zero exit code instead of a traceback."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Container
from pathlib import Path
from types import TracebackType

INSTALL_FAIRSEQ = (
    "pip install wheel 'setuptools<81' && "
    "READTHEDOCS=1 pip install --no-build-isolation --no-binary fairseq-fixed fairseq-fixed==0.12.3.1"
)
# Set to anything, it shows the traceback of a mistake above its sentence.
TRACEBACK = "FAIRSEQ_MS_TRACEBACK"

# What fairseq itself raises for its users' mistakes: pattern of its message, and the rule that was broken.
_MISTAKES = (
    (
        r"No such file or directory: '.*dict\.txt'|Incorrect encoding detected in|Incorrect dictionary format"
        r"|Duplicate word found when loading Dictionary|Dataset not found: ",
        "DATA must be as fairseq-preprocess wrote it",
    ),
    (r"^The dataset is empty\.", "DATA must have rows, and --max-tokens and --tokens-per-sample room for one"),
    (r"^Must specify batch size either", "--batch-size or --max-tokens must be given"),
    (r"^\w+ is required!$", "a flag that every training needs must be given"),
    (r"^Model file not found: ", "--path must name a checkpoint that exists, and a single one to score with"),
    (
        r"^world size is \d+ but have \d+ available devices",
        "--distributed-world-size must be at most the number of GPUs where no launcher starts the processes",
    ),
    (r"^--finetune-from-model .* does not exist", "--finetune-from-model must name a checkpoint that exists"),
    (
        r"^--finetune-from-model (can not|and --restore-file)",
        "--finetune-from-model must be given without --restore-file and the flags that begin with --reset",
    ),
    (
        r"^Sentences lengths should not exceed max_tokens=",
        "--max-tokens and --max-tokens-valid must leave room for the longest row, of up to --tokens-per-sample",
    ),
    (
        r"^Size of sample #\d+ is invalid",
        "--tokens-per-sample and --max-target-positions must leave room for the longest sample",
    ),
    (
        r"^Unsupported language modeling target: ",
        "--self-target and --past-target must be left out: models here predict the next token",
    ),
    (
        r"^Interpolation key 'task\.\w+' not found|^Could not infer language pair",
        "--task must be one of language modelling, such as language_modeling or streaming_language_modeling",
    ),
    (
        r"^Cannot resume training due to dataloader mismatch",
        "--save-dir, or --restore-file where it is given, must hold a checkpoint from an epoch of the same batches, "
        "by the same data and flags",
    ),
    (
        r"^Unsupported optimizer: ",
        "--memory-efficient-fp16 and --memory-efficient-bf16 must be left out with an optimizer that lacks them",
    ),
    (r"^Either --max_update or --lr-period-updates", "--max-update must say over how many updates a cosine falls"),
    (
        r"^--sampling-top[kp] requires|^--sampling requires --nbest|^--batch-size cannot be larger than --buffer-size"
        r"|^Provided Search parameters are mutually exclusive|^min_len cannot be larger than max_len"
        r"|^DiverseBeamSearch requires --beam|^--temperature must be",
        "flags of generation must fit together",
    ),
    (
        r"\(<(unknown|string)>, line \d+\)$|^malformed node or string",
        "--model-overrides must be a dictionary as Python writes it, such as {'data': 'FOLDER'}",
    ),
    (
        r"have NCCL built in|^ProcessGroupNCCL is only supported with GPUs",
        "--distributed-backend (distributed_training.distributed_backend) must be gloo on a machine without a GPU",
    ),
    (r"^Please install editdistance", "--scoring must be another, or the package editdistance installed"),
    (r"^logits must be finite", "--path must name a checkpoint of finite weights"),
    (r"^AdaptiveLoss is not compatible", "--ddp-backend must be legacy_ddp with --criterion adaptive_loss"),
)
_QUOTED_TRACEBACK = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*): (?P<text>.*)$", re.MULTILINE)

_CHOICE = re.compile(r"argument (?P<flag>--[\w-]+)\S*: invalid choice: (?P<value>.+?) \(choose from", re.DOTALL)
_UNKNOWN = re.compile(r"unrecognized arguments: .*?(?P<flag>--[^\s=]+)")


class UsageError(ValueError):
    """Bad input: one sentence that names the flag (or the file), the rule and the value.

    Raise it wherever a user's value can break a rule. Uncaught in a fairseq command, it is printed as
    `fairseq-train: error: <sentence>`, exit code 1, without a traceback; every other exception keeps
    its own.
    """


def traceback_wanted() -> bool:
    """Whether the user asks for the traceback of a mistake, too."""
    return bool(os.environ.get(TRACEBACK))


def sentence_of(error: BaseException) -> str | None:
    """The one sentence to show for an error that the user caused; None for a bug, which needs its traceback."""
    kind, text = type(error).__name__, str(error)
    # A data-loading worker hands on its error, and a process its fellow's, with the traceback as the text.
    if "Traceback (most recent call last)" in text and (quoted := _QUOTED_TRACEBACK.findall(text)):
        kind, text = quoted[-1]
    text = " ".join(text.split())
    if kind.rpartition(".")[2] == UsageError.__name__:
        return text
    rule = next((rule for pattern, rule in _MISTAKES if re.search(pattern, text)), None)
    if rule is None:
        return None
    # hydra trains in another folder than that in which its process ends.
    missing = re.search(r"No such file or directory: '(.+)'|^--finetune-from-model (.+) does not exist", text)
    if missing and Path(missing[1] or missing[2]).exists():
        rule += ", given by an absolute path, since hydra runs in a folder of its own"
    rule += bin_hint(Path(missing[1]).parent) if missing and missing[1] else ""
    return f"{rule} ({text.partition(': {')[0].rstrip('.')})"


def missing_package(error: BaseException, what: str) -> str | None:
    """The sentence for fairseq, or what comes with it, where it is not installed; None for any other error.

    Args:
        what: needs it
    """
    top = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if top == "yaml":
        return f"{what} needs the package pyyaml, which fairseq brings, too: run pip install pyyaml"
    if top not in ("fairseq", "fairseq_cli", "omegaconf", "hydra"):
        return None
    return f"{what} needs fairseq, which is missing; run: {INSTALL_FAIRSEQ}"


def bin_hint(folder: str | Path) -> str:
    """What to add about a folder without data: that they are in its ``bin``, where fairseq-ms prepare writes them."""
    inside = Path(folder, "bin")
    return f"; did you mean {inside}?" if (inside / "dict.txt").is_file() else ""


def parser_sentence(message: str, parser: ArgumentParser) -> str:
    """What a parser says of a mistake: of a flag or name that it does not know, the nearest it knows."""
    known = parser._option_string_actions
    choice, unknown = _CHOICE.search(message), _UNKNOWN.search(message)
    if choice and choice["flag"] in known:
        names = sorted(map(str, known[choice["flag"]].choices or ()))
        value = choice["value"].strip("'")
        near = difflib.get_close_matches(value, names, 3)
        hint = f"such as {' or '.join(near)}" if near else "as --help lists them"
        rule = f"one of {', '.join(names)}" if len(names) <= 12 else f"a name that fairseq knows, {hint}"
        return f"{choice['flag']} must be {rule}: got {value!r}"
    if not unknown:
        return f"{message} ({parser.prog} --help says more)"
    flag = unknown["flag"]
    if flag == "--decoder-layers" and "--scale-layers" in known:
        return f"{flag} is no flag of this model: --scale-layers says how many layers it has at each scale"
    fairseqs = "--task" in known
    # fairseq's parser may be asked by a command that has flags of its own.
    every = [*vars(parser).get("own_flags", ()), *known]
    begun = sorted((name for name in every if name.startswith(flag)), key=len)
    near = begun or difflib.get_close_matches(flag, every, 1)
    hint = f": did you mean {near[0]}?" if near else " (--help lists those it has)"
    whose = "this command, task and model" if fairseqs else parser.prog
    return f"{flag} is no flag of {whose}{(fairseqs and _owners(flag, known)) or hint}"


def _owners(flag: str, known: Container[str]) -> str | None:
    """Which tasks, models and the like have a flag, of those that this command has a choice of."""
    from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
    from fairseq.tasks.language_modeling import LanguageModelingTask

    ours = {name for name, model in MODEL_REGISTRY.items() if model.__module__.startswith("fairseq_ms.")}
    ours |= {name for name, task in TASK_REGISTRY.items() if issubclass(task, LanguageModelingTask)}
    choices = {"task": TASK_DATACLASS_REGISTRY, "arch": MODEL_DATACLASS_REGISTRY}
    choices = {kind: {name: rows[name] for name in ours & rows.keys()} for kind, rows in choices.items()}
    choices |= {kind.replace("_", "-"): rows["dataclass_registry"] for kind, rows in REGISTRIES.items()}
    field = flag[2:].replace("-", "_")
    for kind, rows in choices.items():
        names = sorted(name for name, config in rows.items() if field in config.__dataclass_fields__)
        if names and f"--{kind}" in known:
            return f": it is one of --{kind} {' or '.join(names)}"
    return None


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """``sys.excepthook``: one sentence for what the user caused, and a traceback for everything else."""
    sentence = "interrupted" if isinstance(error, KeyboardInterrupt) else sentence_of(error)
    if sentence is None or traceback_wanted():
        traceback.print_exception(kind, error, trace)
    if sentence is not None:
        sys.stdout.flush()
        print(f"{Path(sys.argv[0]).stem}: error: {sentence}", file=sys.stderr)
