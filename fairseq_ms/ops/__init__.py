"""The older name of ``fairseq_ms.core.ops``."""

import sys

from fairseq_ms.core.ops import attention, linear, recompute, relative_attention, window_attention

for _module in (attention, linear, recompute, relative_attention, window_attention):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
