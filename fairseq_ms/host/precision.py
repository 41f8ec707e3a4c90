"""``--bf16`` on a command line trains in bfloat16; fairseq takes it for a TPU's as well."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from fairseq.distributed import utils as distributed_utils

from fairseq_ms.host.wrapping import wrap


def install() -> None:
    """Have fairseq's commands ask for a TPU only if the user does; calling it again does nothing."""
    wrap(distributed_utils, "call_main", _without_a_tpu)


def _without_a_tpu(original: Callable[..., Any], cfg: Any, *args: Any, **settings: Any) -> Any:
    """``call_main``, which has the flags that fairseq has parsed."""
    implied = cfg.common.bf16 and cfg.common.tpu and "--tpu" not in sys.argv
    if implied and importlib.util.find_spec("torch_xla") is None:
        # Task, optimizer and others have copies of the flag.
        for section in cfg.values():
            if getattr(section, "tpu", False):
                section.tpu = False
    return original(cfg, *args, **settings)
