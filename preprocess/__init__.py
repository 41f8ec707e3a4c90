"""Data sets: from the file people download to fairseq's binarised form."""
