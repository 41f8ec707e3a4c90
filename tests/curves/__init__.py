"""The first 20 updates of every architecture: losses and gradient norms are kept in ``curves.json``.

A change of numerics, wanted or not, moves them. ``python -m tests.curves.record`` writes them anew.
"""
