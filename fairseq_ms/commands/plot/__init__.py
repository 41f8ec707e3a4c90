"""`fairseq-ms plot`: figures that need no checkpoint."""

from __future__ import annotations

import argparse

from fairseq_ms.commands.plot import attention
from fairseq_ms.errors import UsageError
from fairseq_ms.papers.plot import context, curves
from fairseq_ms.tools import report


def run(args: argparse.Namespace) -> int:
    """Print the figure's numbers, and write what was asked for."""
    report.check_outputs(args)
    if args.fairseq_flags and args.figure != "attention":
        raise UsageError(f"plot {args.figure} has no flag {args.fairseq_flags[0]}")
    {"attention": attention, "context": context, "curves": curves}[args.figure].run(args)
    return 0
