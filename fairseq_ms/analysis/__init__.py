"""What the papers measure on their models: one file or folder for each command of `fairseq-ms`, and what they share.

A command is a row of the table in `fairseq_ms.cli` and a module with

    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(args: argparse.Namespace) -> int: ...   # the exit code; 0 is success

In a folder that is `command.py`, and the files beside it compute what it prints. Keep the top of a command's module
light (argparse, json, pathlib) and import torch and fairseq inside `run`, so that `--help` answers at once. Before
`run` is called, all models, tasks and criterions are registered, unless the module says `NEEDS_FAIRSEQ = False`.
`args.command` is the command's name.

A flag has fairseq's name where fairseq has one, and otherwise the name that other commands have for the same thing;
`arguments.add_flag` keeps its older names, which no help shows, and `flags.add_counts` declares counts in a line each.
What asks several checkpoints about the same tokens begins with `comparison.load` and ends with `comparison.write`.

A module that says `TAKES_FAIRSEQ_FLAGS = True` finds all arguments that its parser does not know, such as
`--arch retina_lm --decoder-layers 4`, in `args.fairseq_flags`. One that says `PASSES_ON = True` finds all arguments,
unparsed, in `args.passed_on`.

For bad input raise `fairseq_ms.errors.UsageError` (or any ValueError): the user sees its one sentence on stderr as
`fairseq-ms: ...` and the exit code is 2.
"""
