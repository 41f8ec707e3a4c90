"""Training criterions; each file registers what it defines."""
