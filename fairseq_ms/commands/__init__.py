"""Commands of `fairseq-ms` that ask no checkpoint; `fairseq_ms.analysis` says what a command's module defines."""
