"""The stages shared by every data set: read, tokenise, learn BPE, apply BPE, dictionary, binarise, publish."""
