"""One module a data set: what it is, and the command line that prepares it."""
