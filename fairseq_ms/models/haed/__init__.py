"""``haed`` and ``hred``, and the model of their first phase."""

from fairseq_ms.models.haed.model import HAED, HRED

__all__ = ["HAED", "HRED"]
