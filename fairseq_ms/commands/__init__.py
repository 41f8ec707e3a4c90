"""The commands of `fairseq-ms`, a file each; those that only the papers' tables need lie in `fairseq_ms.papers`.

`context_window.py` is `fairseq-ms context-window`, and `plot/attention.py` is `fairseq-ms plot attention`; a file whose
name begins with `_` is none. The first line of its docstring is its help, and it defines

    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(args: argparse.Namespace) -> int | None: ...   # the exit code, if it is another than 0

It imports torch and fairseq where it uses them, inside functions, so that `--help` answers at once, and before fairseq
calls `arguments.register`. When it runs, what `--json` and its like name can be written. `args.command` is its name.

A flag has fairseq's name where fairseq has one, and otherwise the name that other commands have for the same thing;
`arguments.add_flag` keeps its older names, which no help shows, and `add_counts` declares counts in a line each. What
asks several checkpoints about the same tokens begins with `comparison.load` and ends with `comparison.write`.

A command whose flags `set_defaults(fairseq_flags=[])` finds all arguments that its parser does not know, such as
`--arch retina_lm --decoder-layers 4`, in `args.fairseq_flags`, and the names of its own in `args.own_flags`. A module
that says `PASSES_ON = True` finds all arguments, unparsed, in `args.passed_on`.

For bad input raise `fairseq_ms.errors.UsageError`: the user sees its one sentence on stderr as `fairseq-ms: ...` and
the exit code is 2.
"""
