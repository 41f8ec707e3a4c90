"""`fairseq-ms plot FIGURE`: those of the papers."""
