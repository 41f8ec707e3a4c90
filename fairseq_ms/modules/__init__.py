"""Layers shared by the models. Nothing here knows fairseq's registry or its command line.

Shapes, in this package and everywhere else: B batch, T tokens, C coarse positions, S keys, N heads,
H head dim, D model dim, V vocabulary. ``x_BTD`` is a tensor of shape (B, T, D).
"""
