"""What the models cost in memory and time, against naive twins and against other implementations.

`fairseq-ms bench NAME...` measures the tables of this folder, on a CPU or, with `--device cuda`, on a GPU. Rows are
data (`table.py`), and must agree at a small shape before any of them is measured. Then every row runs in a process of
its own for its memory, and the rows of a cohort take turns for their times, so that ratios are of the same rounds
(`measuring.py`). The same command goes on where the last one ended. `windows.py` is a program of its own: it trains.
"""
