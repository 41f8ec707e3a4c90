"""Run lm-evaluation-harness, with checkpoints as its model fairseq_ms."""

from __future__ import annotations

import argparse
import sys
from unittest.mock import patch

from fairseq_ms.errors import UsageError
from fairseq_ms.tools.arguments import register

PASSES_ON = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags are the harness's own."""
    parser.usage = "fairseq-ms lm-eval --model fairseq_ms --model_args path=CHECKPOINT,... --tasks TASK [FLAGS ...]"
    parser.epilog = "The flags are those of lm_eval: fairseq-ms lm-eval run --help lists them."


def run(args: argparse.Namespace) -> None:
    """Hand the flags over to the harness, whose exit code is that of the process."""
    from fairseq_ms.core.ops.device import prefer_flash

    register()
    prefer_flash()  # prompts and choices have any length
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        raise UsageError(f"fairseq-ms lm-eval needs the package lm_eval: run pip install lm_eval ({error})") from error
    from fairseq_ms.harness import model  # noqa: F401  (registers the model)

    with patch.object(sys, "argv", ["lm_eval", *args.passed_on]):
        cli_evaluate()
