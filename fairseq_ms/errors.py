"""The error that users cause."""


class UsageError(ValueError):
    """Bad input: one sentence that names the flag (or the file), the rule and the value.

    Raise it wherever a user's value can break a rule. Uncaught in a fairseq command, it is printed as
    `fairseq-train: error: <sentence>`, exit code 1, without a traceback (`host/errors.py`); every other exception
    keeps its own.
    """
