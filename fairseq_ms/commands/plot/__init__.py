"""`fairseq-ms plot FIGURE`: figures that need no checkpoint."""
