"""The stages all data sets share: read, tokenise, learn and apply BPE, dictionary, binarise, publish."""
