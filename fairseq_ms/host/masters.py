"""Checkpoints of trainings in half precision: float32 masters, and the counters of the loss scaler.

fairseq's own checkpoints hold the rounded weights and the scale alone, so that a resumed run differs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from fairseq.optim.fp16_optimizer import FP16Optimizer
from torch import Tensor
from torch.amp import GradScaler

# In a checkpoint's extra state, which fairseq hands to all ranks.
MASTERS, SCALER = "masters", "loss_scaler"
# The scaler's other attributes are flags.
_COUNTS = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


def masters(optimizer: Any) -> list[Tensor]:
    """Those of the parameters under ``--fp16`` or ``--bf16``, in their shapes; fairseq may keep them as one vector."""
    if not isinstance(optimizer, FP16Optimizer):
        return []
    if not optimizer.has_flat_params:
        return [master.data for master in optimizer.fp32_params]
    found, begun = [], Counter[int]()
    for weight in optimizer.fp16_params:
        place, size = weight.device.index, weight.numel()
        found.append(optimizer.fp32_params[place].data[begun[place] :][:size].view_as(weight))
        begun[place] += size
    return found


def state_dict(optimizer: Any) -> dict[str, Any]:
    """What goes into the checkpoint, of tensors and numbers; nothing in single precision."""
    state: dict[str, Any] = {MASTERS: found} if (found := masters(optimizer)) else {}
    scaler = getattr(optimizer, "scaler", None)
    if isinstance(scaler, DynamicLossScaler):
        state[SCALER] = {name: getattr(scaler, name) for name in _COUNTS}
    elif isinstance(scaler, GradScaler) and scaler.is_enabled():
        state[SCALER] = scaler.state_dict()
    return state


def load_state_dict(optimizer: Any, state: dict[str, Any]) -> str | None:
    """Take up ``state_dict``'s in an optimizer that was made of the checkpoint's weights; what was lost, if any was.

    A checkpoint may have been averaged or edited: a master is taken where it rounds to its weights.
    """
    scaler, counted = getattr(optimizer, "scaler", None), state.get(SCALER, {})
    if isinstance(scaler, DynamicLossScaler):
        vars(scaler).update((name, counted[name]) for name in _COUNTS if name in counted)
    elif isinstance(scaler, GradScaler) and scaler.is_enabled() and counted:
        scaler.load_state_dict(counted)
    found = masters(optimizer)
    if not found:
        return None
    if MASTERS not in state:
        return "the checkpoint holds no float32 masters: they begin at its weights, which are rounded"
    changed = 0
    for weight, master, saved in zip(optimizer.fp16_params, found, state[MASTERS], strict=True):
        if torch.equal(saved.to(weight), weight):
            master.copy_(saved)
        else:
            changed += 1
    some = f"{changed} of {len(found)} weights are not what the checkpoint's float32 masters round to, which begin anew"
    return some if changed else None
