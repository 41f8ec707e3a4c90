"""A training step of a model, on random tokens: its loss, what it keeps for its backward pass, and its time."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.models import FairseqLanguageModel
from omegaconf import DictConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

from fairseq_ms.core.joining import Join, Upsample
from fairseq_ms.core.ops.device import peak_bytes, wait_for
from fairseq_ms.core.optimizers import rows_of_projections
from fairseq_ms.core.pooling import Downsample
from fairseq_ms.core.streaming import StreamingModel
from fairseq_ms.criterions.linear_cross_entropy import LinearCrossEntropyCriterion
from fairseq_ms.errors import UsageError
from fairseq_ms.tools.saved_bytes import saved_bytes_by_place

Parts = Mapping[str, Mapping[str, float]]
"""Bytes by part of a model and by purpose."""
Sample = dict[str, Any]
"""A batch as fairseq's trainer hands it to a criterion."""


def total(parts: Parts) -> float:
    """All bytes."""
    return sum(sum(purposes.values()) for purposes in parts.values())


def tokens_of(cfg: DictConfig) -> int:
    """Tokens of a row of a batch; the symbol that --add-bos-token puts in front is computed like any other."""
    return int(cfg.task.tokens_per_sample + cfg.task.add_bos_token)


def training_sample(model: FairseqLanguageModel, batch: int, tokens: int) -> Sample:
    """Random tokens (B, T) as fairseq's trainer hands them over, with a streaming model's memory."""
    generator = torch.Generator().manual_seed(1)
    symbols = len(model.decoder.dictionary)
    device = next(model.parameters()).device
    source = torch.randint(4, symbols, (batch, tokens), generator=generator).to(device)
    target = torch.randint(4, symbols, (batch, tokens), generator=generator).to(device)
    net_input = {"src_tokens": source}
    if isinstance(getattr(model.decoder, "core", None), StreamingModel):
        net_input["memory"] = model.decoder.core.new_memory(batch)
    return {"net_input": net_input, "target": target, "ntokens": batch * tokens}


def training_loss(model: FairseqLanguageModel, sample: Sample, linear: bool = False) -> Tensor:
    """The summed loss of a sample, as fairseq's cross_entropy or adaptive_loss computes it, or linear_cross_entropy."""
    task = SimpleNamespace(target_dictionary=model.decoder.dictionary)
    if getattr(model.decoder, "adaptive_softmax", None) is not None:
        return AdaptiveLoss(task, False)(model, sample)[0]
    if linear:
        return LinearCrossEntropyCriterion(task, False, label_smoothing=0.0)(model, sample)[0]
    return CrossEntropyCriterion(task, False)(model, sample)[0]


def step_parts(model: FairseqLanguageModel, batch: int, tokens: int, linear: bool = False) -> Parts:
    """Bytes that a training step on (B, T) tokens keeps for its backward pass, by part of the model and by purpose.

    Parts are what the model has at its top, one for each scale, and last "output, loss" with all else; purposes are
    "attention", "feed-forward" and "rest". More than two samples are not run: each further one keeps as much as the
    second does. With ``linear``, the loss is linear_cross_entropy's. Raises UsageError where shapes alone do not tell.
    """
    model.train()
    if isinstance(next(model.parameters()), FakeTensor) and not hasattr(model.decoder, "core"):
        raise UsageError(f"shapes alone do not tell what {type(model).__name__} keeps, only a measurement does")
    running = [("output, loss", "rest")]
    places = [*_places(getattr(model.decoder, "core", model.decoder)).items()]
    few = []
    with contextlib.ExitStack() as hooks:
        for module, place in places:
            # linear_cross_entropy does not call it, and would if it had hooks.
            if linear and place[0] == "project":
                continue
            before = module.register_forward_pre_hook(lambda *_, place=place: running.append(place))
            after = module.register_forward_hook(lambda *_: running.pop() and None)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        for samples in range(1, min(batch, 2) + 1):
            loss = partial(training_loss, model, training_sample(model, samples, tokens), linear)
            few.append(saved_bytes_by_place(loss, lambda: running[-1], model))
    parts: dict[str, dict[str, float]] = defaultdict(dict)
    for part, purpose in dict.fromkeys([*(place for _, place in places), running[0]]):
        first, last = (kept.get((part, purpose), 0) for kept in (few[0], few[-1]))
        if last:
            parts[part][purpose] = first + (batch - 1) * (last - first)
    return dict(parts)


def _places(core: nn.Module) -> dict[nn.Module, tuple[str, str]]:
    """The part and the purpose of the modules inside of a model, to each of which a hook belongs.

    What has no parts, or is made again in backward, is left out: what has hooks may keep more. It counts as what it is
    a part of.
    """
    places = {}
    for name, module in core.named_modules():
        part, _, inside = name.partition(".")
        if inside and (isinstance(module, (Downsample, Join, Upsample)) or not [*module.children()]):
            continue
        index = inside.partition(".")[0]
        # Layers are not told apart, but scales are.
        if index.isdecimal() and not hasattr(one := core.get_submodule(f"{part}.{index}"), "attention"):
            part += f" {one.factor}x" if hasattr(one, "factor") else f" {index}"
        if part:
            purpose = "attention" if "attention" in name else "feed-forward" if "ffn" in name else "rest"
            places[module] = part, purpose
    return places


def step_bytes(model: FairseqLanguageModel, batch: int, tokens: int, linear: bool = False) -> int:
    """Bytes that a training step on (B, T) tokens keeps for its backward pass: the sum of ``step_parts``."""
    return int(total(step_parts(model, batch, tokens, linear)))


class ShapesAlone(FakeTensorMode):
    """Inside, tensors have shapes and no numbers: models are built and trained on without memory or work for them.

    Raises UsageError where a shape depends on numbers.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The numbers that a model asks for are the seeds of its dropouts.
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DynamicOutputShapeException as why:
            raise UsageError("what it keeps depends on the tokens, which only a measurement has") from why


def cuda_peak(model: FairseqLanguageModel, batch: int, tokens: int, linear: bool = False) -> int | None:
    """torch.cuda.max_memory_allocated of a training step without optimizer, the paper's own measure; None on a CPU."""
    model.train()
    sample = training_sample(model, batch, tokens)
    peak = peak_bytes(next(model.parameters()).device, lambda: training_loss(model, sample, linear).backward())
    model.zero_grad(set_to_none=True)
    return peak


def seconds(model: FairseqLanguageModel, batch: int, tokens: int) -> float:
    """The shortest of several forward and backward passes on random tokens (B, T), after one to warm up."""
    model.train()
    sample = training_sample(model, batch, tokens)
    taken = shortest(lambda: training_loss(model, sample).backward(), next(model.parameters()).device)
    model.zero_grad(set_to_none=True)
    return taken


def shortest(run: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Seconds of the shortest of several runs on a device, after one to warm up."""
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        wait_for(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def logits_gradient(model: FairseqLanguageModel, batch: int, tokens: int, linear: bool = False) -> float:
    """Bytes of the gradient of all logits, in fairseq's single precision; 0 where a loss does not hold them at once."""
    adaptive = getattr(model.decoder, "adaptive_softmax", None) is not None
    return 0.0 if adaptive or linear else 4.0 * batch * tokens * len(model.decoder.dictionary)


def weight_bytes(model: nn.Module, muon: bool = False) -> dict[str, float]:
    """Bytes of weights, gradients and the optimizer's state: Adam has two moments, Muon one for the layers' matrices.

    In half precision they are of single precision copies, which are kept, too.
    """
    weights = float(sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()))
    moments = 8 * sum(parameter.numel() for parameter in model.parameters())
    moments -= 4 * sum(matrix.numel() for matrix in rows_of_projections(model)) if muon else 0
    copies = 2 * weights if next(model.parameters()).element_size() == 2 else 0
    name = "Muon and AdamW" if muon else "Adam"
    return {"weights": weights, "gradients": weights, name: moments + copies}
