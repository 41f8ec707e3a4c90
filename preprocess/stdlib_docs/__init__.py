"""The Python standard library's own documentation as a small English corpus."""
