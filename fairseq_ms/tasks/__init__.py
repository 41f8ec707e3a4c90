"""fairseq tasks; each file registers what it defines."""
