"""Second references: each family written again from its paper, without reading the models or ``tests/naive``.

One sequence, one position, one head and one key at a time, in NumPy and in double precision: slow, obvious. A twin in
``tests/naive`` shows that a fast path computes what we meant; these show that we meant what the paper says. They share
no code with the package and know only the names and shapes of its parameters.
"""
