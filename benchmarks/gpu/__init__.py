"""What the models cost on a GPU, at the papers' sizes: tests on the device first, then tables in docs/results_gpu.md.

`python -m benchmarks.gpu` in a checkout (or `make gpu`) runs it. Every row of every table is measured by itself, and
is written to a file of JSON lines at once: a row that does not fit or fails says so and stops no other, and the same
command goes on where the last one ended. `device.py` has all calls of CUDA, beside a twin for a CPU, on which tiny
shapes run through everything else.
"""
