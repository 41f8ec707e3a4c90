"""Subcommands of `fairseq-ms`: one module each, found by listing this folder and `fairseq_ms/analysis`.

A module becomes a subcommand by defining, at its top level:

    NAME = "context-length"                     # what the user types, a plain string literal
    HELP = "print the context length ..."       # one line for the list of commands, a plain string literal

    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(args: argparse.Namespace) -> int: ...   # the exit code; 0 is success

`fairseq-ms` reads NAME and HELP from the source text and imports only the module of the command that was
asked for, so nothing else has to be listed anywhere. Keep the top of a command module light (argparse, json,
pathlib) and import torch and fairseq inside `run`; before `run` is called, all models, tasks and criterions
are registered, unless the module says `NEEDS_FAIRSEQ = False`.

A module that says `TAKES_FAIRSEQ_FLAGS = True` finds all arguments that its parser does not know, such as
`--arch retina_lm --decoder-layers 4`, in `args.fairseq_flags`.

For bad input raise `fairseq_ms.errors.UsageError` (or any ValueError): the user sees its one sentence on
stderr as `fairseq-ms: ...` and the exit code is 2.
"""
