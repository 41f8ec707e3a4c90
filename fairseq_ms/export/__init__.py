"""`fairseq-ms export`: a checkpoint as a folder that `transformers` loads where no fairseq is installed."""
