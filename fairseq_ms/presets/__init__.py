"""Every row of the papers' tables, one file a paper, all listed in ``registry``: data, without torch and fairseq."""

from fairseq_ms.presets import haed, multiscale, recipes, transformer_ql

__all__ = ["haed", "multiscale", "recipes", "transformer_ql"]
