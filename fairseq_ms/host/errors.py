"""What users cause ends in one sentence on stderr and a non-zero exit code instead of a traceback."""

import os
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

from fairseq_ms.errors import UsageError

# Set to anything, it shows the traceback of a mistake above its sentence.
TRACEBACK = "FAIRSEQ_MS_TRACEBACK"

# What fairseq itself raises for its users' mistakes: class, pattern of its message, our sentence.
_MISTAKES = (
    (
        "FileNotFoundError",
        re.compile(r"No such file or directory: '(?P<file>.*dict\.txt)'"),
        "DATA must be a folder written by fairseq-preprocess: {file} is missing",
    ),
    (
        "Exception",
        re.compile(r"Incorrect encoding detected in (?P<file>.*), please rebuild the dataset"),
        "DATA must be as fairseq-preprocess wrote it: {file} is not text in UTF-8",
    ),
    (
        "ValueError",
        re.compile(r"Incorrect dictionary format, expected '<token> <cnt> \[flags\]': \"(?P<line>.*)\"", re.DOTALL),
        "DATA must be as fairseq-preprocess wrote it: a line of its dictionary is no symbol and count, {line!r}",
    ),
    (
        "RuntimeError",
        re.compile(r"Duplicate word found when loading Dictionary: '(?P<word>.*)'\. "),
        "DATA must be as fairseq-preprocess wrote it: its dictionary has {word!r} twice",
    ),
    (
        "FileNotFoundError",
        re.compile(r"Dataset not found: (?P<split>\S+) \((?P<path>.*)\)"),
        "the subset must be one that fairseq-preprocess wrote: there is no {split}, {path}.bin is missing",
    ),
    (
        "OSError",
        re.compile(rf"Model file not found: (?P<files>.+{re.escape(os.pathsep)}.+)"),
        "--path must be a single checkpoint here, since fairseq makes ensembles only for fairseq-generate and "
        "fairseq-interactive: got {files}",
    ),
    (
        "OSError",
        re.compile(r"Model file not found: (?P<file>.*)"),
        "--path must name a checkpoint: {file} does not exist",
    ),
    (
        "Exception",
        re.compile(r"Cannot load model parameters from checkpoint (?P<file>.*); please ensure"),
        "--restore-file must hold a model of the same --arch, --positions and sizes: {file} does not fit this one",
    ),
    (
        "AttributeError",
        re.compile(r"'NoneType' object has no attribute 'xla_device'"),
        "--tpu needs the package torch_xla, which is not installed",
    ),
    (
        "ValueError",
        re.compile(r"Unsupported language modeling target: (self|past)"),
        "--self-target and --past-target must be left out: the models predict the next token alone",
    ),
    (
        "Exception",
        re.compile(
            r"Size of sample #(?P<number>\d+) is invalid \(=\(?(?P<size>\d+).* since max_positions=\(?(?P<most>\d+)"
        ),
        "--tokens-per-sample, --max-target-positions and --max-tokens must leave room for the longest sample: number "
        "{number} has {size} tokens and {most} fit (--sample-break-mode none cuts lines, and "
        "--skip-invalid-size-inputs-valid-test leaves them out)",
    ),
    (
        "Exception",
        re.compile(r"^The dataset is empty\."),
        "DATA must fill a batch: a last batch whose size is no multiple of --required-batch-size-multiple is left out, "
        "and so are samples without room",
    ),
    (
        "AssertionError",
        re.compile(r"Sentences lengths should not exceed max_tokens=(?P<most>\d+)"),
        "--max-tokens must be at least the length of the longest sample, --tokens-per-sample or that of a line with "
        "--sample-break-mode eos or complete: got {most}",
    ),
    *(
        (
            kind,
            re.compile(
                r"gloo.*(Connection (closed|reset) by peer|Connection refused|Broken pipe)|remote process exited",
                re.DOTALL,
            ),
            "another process of this run has ended, and its own output says why; the same command goes on from the "
            "last checkpoint",
        )
        for kind in ("RuntimeError", "DistBackendError")
    ),
    (
        "ProcessExitedException",
        re.compile(r"^process (?P<rank>\d+) terminated with signal (?P<name>\w+)"),
        "process {rank} of this run was ended by {name}, often because memory has run out; the same command goes on "
        "from the last checkpoint",
    ),
    (
        "RuntimeError",
        re.compile(
            r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?P<what>is killed by signal: \w+|exited unexpectedly)"
        ),
        "--num-workers: a process that reads data {what}, often because memory has run out; the same command goes on "
        "from the last checkpoint",
    ),
    (
        "RuntimeError",
        re.compile(r"Cannot resume training due to dataloader mismatch"),
        "--restore-file must have been written in an epoch of the same batches to be continued: keep the data, "
        "--sample-break-mode, --tokens-per-sample, --batch-size and --max-tokens, or use --reset-dataloader to begin "
        "a new epoch",
    ),
    *(
        (
            kind,
            re.compile(r"^(Optimizer does not match; please reset|loaded state dict .* parameter group)"),
            "--restore-file must hold the state of the same --optimizer: --reset-optimizer begins with a new one",
        )
        for kind in ("AssertionError", "ValueError")
    ),
    (
        "ValueError",
        re.compile(r"^Unsupported optimizer: (Fairseq)?(?P<name>\w+)"),
        "--memory-efficient-fp16 and --memory-efficient-bf16 must be left out with this --optimizer: {name} keeps its "
        "state in float32",
    ),
    (
        "AssertionError",
        re.compile(r"Either --max_update or --lr-period-updates must be set"),
        "--max-update must say over how many updates a cosine falls: fairseq-ms config PRESET --data DATA writes one "
        "epoch's",
    ),
    (
        "Exception",
        re.compile(r"AdaptiveLoss is not compatible with the PyTorch version of DistributedDataParallel"),
        "--ddp-backend must be legacy_ddp with --criterion adaptive_loss",
    ),
    (
        "AssertionError",
        re.compile(r"Torch not compiled with CUDA enabled"),
        "--fp16 must be left out on a machine without a GPU: this torch is built for CPUs only",
    ),
    (
        "RuntimeError",
        re.compile(r"^(Found no NVIDIA driver|The NVIDIA driver on your system is too old|No CUDA GPUs are available)"),
        "--fp16 must be left out on a machine without a GPU: torch finds none",
    ),
    (
        "AssertionError",
        re.compile(r"^world size is (?P<size>\d+) but have (?P<gpus>\d+) available devices"),
        "--distributed-world-size must be at most the number of GPUs here, {gpus}, unless a launcher such as torchrun "
        "starts the processes: got {size}",
    ),
    *(
        (
            kind,
            re.compile(r"NCCL built in|ProcessGroupNCCL is only supported with GPUs"),
            "--distributed-backend must be gloo on machines without GPUs: got nccl",
        )
        for kind in ("RuntimeError", "ValueError", "DistBackendError")
    ),
    (
        "DistNetworkError",
        re.compile(r"failed to listen .* port: (?P<port>\d+).*EADDRINUSE"),
        "--distributed-port must be free where the first process runs: another program listens on {port}",
    ),
    (
        "DistStoreError",
        re.compile(r"Timed out after (?P<wait>\d+) seconds waiting for clients\. (?P<came>\d+)/(?P<size>\d+) clients"),
        "--distributed-world-size {size} says that so many processes are started: {came} had come within {wait} "
        "seconds",
    ),
    (
        "DistNetworkError",
        re.compile(
            r"client socket has timed out after \d+ms while trying to connect to \((?P<host>.*), (?P<port>\d+)\)"
        ),
        "the first process of this run must be reachable: nobody answers at {host}:{port}",
    ),
    (
        "ImportError",
        re.compile(r"install (the )?fairscale"),
        "--ddp-backend slowmo and --zero-sharding os need the package fairscale, which is not installed",
    ),
)

_QUOTED_TRACEBACK = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*): (?P<text>.*)$", re.MULTILINE)


def traceback_wanted() -> bool:
    """Whether the user asks for the traceback of a mistake, too."""
    return bool(os.environ.get(TRACEBACK))


def sentence_of(error: BaseException) -> str | None:
    """The one sentence to show for an error that the user caused; None for a bug, which needs its traceback."""
    kind, text = type(error).__name__, str(error)
    # A data-loading worker hands on its error, and a process its fellow's, with the traceback as the text.
    if "Traceback (most recent call last)" in text:
        quoted = _QUOTED_TRACEBACK.findall(text)
        if quoted:
            kind, text = quoted[-1]
            kind = kind.rpartition(".")[2]
    if kind == UsageError.__name__:
        return " ".join(text.split())
    if isinstance(error, (ConnectionError, EOFError)) and _raised_in(error, "multiprocessing/resource_sharer.py"):
        # What a data worker had sent can no longer be fetched from it.
        kind, text = "RuntimeError", "DataLoader worker (pid 0) exited unexpectedly"
    for name, pattern, sentence in _MISTAKES:
        match = pattern.search(text) if kind == name else None
        if match is not None:
            return sentence.format(**match.groupdict())
    return None


def _raised_in(error: BaseException, file: str) -> bool:
    return any(frame.filename.endswith(file) for frame in traceback.extract_tb(error.__traceback__))


def install() -> None:
    """Make what the user caused end this process with one sentence; calling it again does nothing."""
    # hydra catches errors itself and prints a traceback of its own unless it is asked to let them pass.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    if getattr(sys.excepthook, "shows_usage_errors", False):
        return
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sentence = sentence_of(error)
        if sentence is None or traceback_wanted():
            previous(kind, error, trace)
        if sentence is None:
            return
        sys.stdout.flush()
        print(f"{Path(sys.argv[0]).stem}: error: {sentence}", file=sys.stderr)

    show.shows_usage_errors = True  # type: ignore[attr-defined]
    sys.excepthook = show
