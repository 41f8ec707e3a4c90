"""What the models cost in memory and time, against naive twins and against other implementations.

`fairseq-ms bench NAME...` runs the modules of this folder. A module becomes a benchmark by defining, at its top level:

    NAME = "train-speed"            # what the user types
    HELP = "..."                    # one line for the list of benchmarks

    def sections(options: Options) -> Iterable[Section]: ...

A section is one table: contestants that do the same work, a baseline among them, and a parity check that has to
pass before any of them is measured (see `runner.py`).
"""
