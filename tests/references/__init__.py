"""References: each family written from its paper, without reading the models.

One sequence, one position, one head and one key at a time, in double precision: slow, obvious, and differentiated by
autograd. They show that we meant what the paper says, and that fast paths and their gradients compute it. They share no
code with the package and know only the names and shapes of its parameters.
"""
