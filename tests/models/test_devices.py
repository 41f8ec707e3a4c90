"""What can be shown of a GPU without one: nothing leaves its device, and nothing waits for numbers.

The meta device refuses to be mixed with others and to give numbers away. A build of torch with CUDA runs the forward
passes on tensors without data that say they are on a GPU as well, so that what asks for a GPU is run through; their
backward passes would want a driver.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_ms.core import transformer_ql
from fairseq_ms.core.ops import flash_windows, linear, recompute, relative_attention
from fairseq_ms.lm.streaming import StreamingLanguageModel
from tests.registry import ARCHITECTURES, GENERATORS, random_case, setting, trained_case

DEVICES = ["meta", "cuda"] if torch.version.cuda else ["meta"]
every_device = pytest.mark.parametrize("device", DEVICES)
DTYPES = (torch.float32, torch.bfloat16)
# HAED and HRED tabulate the chunks of a batch, and only the tokens tell how many: they wait, and no other model does.
STATIC = [arch for arch in ARCHITECTURES if not setting(arch, "DATA_DECIDES_SHAPES", False)]


@contextmanager
def without_data(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors made here have shapes, types and devices, and no numbers."""
    if device == "meta":
        yield
        return
    # Seeds are drawn on the CPU, so nothing waits for them; a generator of a GPU that is not there cannot be made.
    for module in (linear, recompute, relative_attention):
        monkeypatch.setattr(module, "draw_seed", lambda: 1)
    monkeypatch.setattr(transformer_ql, "draw_uniform", lambda: 0.5)
    monkeypatch.setattr(recompute, "_generator", lambda *unused: SimpleNamespace(manual_seed=lambda seed: None))
    # No driver can say of which generation the GPU is.
    monkeypatch.setattr(flash_windows, "_serves", lambda *unused: True)
    with FakeTensorMode():
        yield


def move(model: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Replace all parameters and buffers by ones without data on the device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                like = dtype if buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = torch.empty(buffer.shape, dtype=like, device=device)


def tokens(device: str, rows: int, length: int) -> torch.Tensor:
    return torch.empty(rows, length, dtype=torch.long, device=device)


@every_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("arch", STATIC)
def test_a_training_step_stays_on_its_device_and_waits_for_nothing(
    arch: str, seed: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = trained_case(arch, seed)
    with without_data(device, monkeypatch):
        move(case.model, device, dtype)
        logits = case.model(tokens(device, 2, max(8, case.lengths())))[0]
        assert (logits.device.type, logits.dtype) == (device, dtype)
        if device == "cuda":
            return
        logits.sum().backward()
        for name, parameter in case.model.named_parameters():
            if parameter.grad is not None:
                assert (parameter.grad.device.type, parameter.grad.dtype) == (device, dtype), name


@every_device
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("arch", [arch for arch in GENERATORS if arch in STATIC])
def test_a_prompt_a_step_and_a_reorder_stay_on_the_device_and_wait_for_nothing(
    arch: str, seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(arch, seed)
    with torch.no_grad(), without_data(device, monkeypatch):
        move(case.model, device, torch.float32)
        core = case.model.decoder.core
        state = core.new_state(2, 16)
        outputs = [core.features(tokens(device, 2, 5), state)]
        outputs += [core.features(tokens(device, 2, 1), state) for _ in range(6)]
        state.reorder(torch.empty(3, dtype=torch.long, device=device))
        outputs.append(core.features(tokens(device, 3, 1), state))
        assert {output.device.type for output in outputs} == {device}


@every_device
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "arch", [arch for arch in STATIC if issubclass(type(random_case(arch, 0).model), StreamingLanguageModel)]
)
def test_a_memory_is_carried_on_without_leaving_the_device(
    arch: str, seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = trained_case(arch, seed)
    with without_data(device, monkeypatch):
        move(case.model, device, torch.float32)
        memory = None
        for _ in range(3):
            logits, extra = case.model(tokens(device, 2, 8), memory=memory)
            memory = extra["memory"]
        assert logits.device.type == device
        if device == "meta":
            logits.sum().backward()
