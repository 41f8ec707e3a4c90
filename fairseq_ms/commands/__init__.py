"""The commands of `fairseq-ms`, a file each; those that only the papers' tables need lie in `fairseq_ms.papers`.

A command is a row of the table in `fairseq_ms.cli`, a function of its name in `tools.flags`, which adds flags to a
parser, and a module with

    def run(args: argparse.Namespace) -> int: ...   # the exit code; 0 is success

The module imports what it needs at its top: it is imported when the flags have been read and all models, tasks and
criterions are registered. `args.command` is the command's name. A command whose module is light has `add_arguments`
there in place of the function in `flags`, and `NEEDS_FAIRSEQ = False` if nothing is to be registered.

A flag has fairseq's name where fairseq has one, and otherwise the name that other commands have for the same thing;
`arguments.add_flag` keeps its older names, which no help shows, and `add_counts` declares counts in a line each. What
asks several checkpoints about the same tokens begins with `comparison.load` and ends with `comparison.write`.

A command whose flags `set_defaults(fairseq_flags=[])` finds all arguments that its parser does not know, such as
`--arch retina_lm --decoder-layers 4`, in `args.fairseq_flags`. A module that says `PASSES_ON = True` finds all
arguments, unparsed, in `args.passed_on`.

For bad input raise `fairseq_ms.errors.UsageError` (or any ValueError): the user sees its one sentence on stderr as
`fairseq-ms: ...` and the exit code is 2.
"""
