"""Chunks, and the parts of HAED and HRED."""
