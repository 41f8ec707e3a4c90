"""What is best so far, and for how long nothing has been better (``--patience``), counts by run and not by process.

fairseq keeps both as attributes of functions: hydra's ``--multirun`` compares a job with the one before it, and a run
that is interrupted forgets the second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils
from fairseq.trainer import Trainer

from fairseq_ms.host.wrapping import wrap

_KEY = "patience"


def install() -> None:
    """Have every run count for itself, and go on counting when it is resumed; calling it again does nothing."""
    wrap(Trainer, "__init__", _anew)
    wrap(Trainer, "save_checkpoint", _with_count)
    wrap(checkpoint_utils, "load_checkpoint", _counting_on)


def _stops_early() -> Any:
    """The function that counts; None outside of ``fairseq-train``. Run by ``python -m``, it is the program's own."""
    programs = (sys.modules["__main__"], sys.modules.get("fairseq_cli.train"))
    return next((found for program in programs if (found := getattr(program, "should_stop_early", None))), None)


def _anew(original: Callable[..., None], *args: Any, **settings: Any) -> None:
    """``Trainer()``, with which a run begins."""
    for function, names in ((checkpoint_utils.save_checkpoint, ("best",)), (_stops_early(), ("best", "num_runs"))):
        for name in names:
            if hasattr(function, name):
                delattr(function, name)
    original(*args, **settings)


def _with_count(original: Callable[..., Any], trainer: Any, filename: str, extra_state: dict[str, Any]) -> Any:
    """``Trainer.save_checkpoint``."""
    counted = getattr(_stops_early(), "best", None), getattr(_stops_early(), "num_runs", 0)
    return original(trainer, filename, extra_state if counted[0] is None else {**extra_state, _KEY: counted})


def _counting_on(original: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """``load_checkpoint``, which takes up what is best unless the run begins anew."""
    state, iterator = original(*args, **settings)
    function, goes_on = _stops_early(), hasattr(checkpoint_utils.save_checkpoint, "best")
    if function is not None and goes_on and _KEY in state:
        function.best, function.num_runs = state[_KEY]
    return state, iterator
