"""The older name of what is now in ``fairseq_ms.core``."""

import sys

from fairseq_ms.core import layers, pooling

sys.modules[f"{__name__}.transformer"], sys.modules[f"{__name__}.pooling"] = layers, pooling
