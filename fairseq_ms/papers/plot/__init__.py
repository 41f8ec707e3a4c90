"""Figures of the papers, for `fairseq-ms plot`."""
