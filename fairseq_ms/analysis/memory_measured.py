"""What a training step keeps for its backward pass, measured."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import options
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import TASK_REGISTRY
from torch import Tensor, nn

from fairseq_ms.errors import UsageError
from fairseq_ms.modules.layer import TransformerStack


class SavedBytes:
    """Context manager that counts the bytes that autograd keeps of what is computed inside.

    Every storage counts once, however many saved tensors look at it, and as a whole; the parameters of
    ``module`` do not count. With ``--checkpoint-activations``, the inputs of the layers do.

    Attributes:
        total: bytes so far
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.total = 0
        self._seen: dict[int, Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._handles: list[Any] = []

    def __enter__(self) -> SavedBytes:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in self.module.parameters()}
        for part in self.module.modules():
            if isinstance(part, TransformerStack) and part.checkpoint:
                # Checkpointing holds the inputs in a closure, where no saved-tensor hook sees them.
                self._handles += [
                    layer.register_forward_pre_hook(lambda _, inputs: self._count(inputs[0])) for layer in part.layers
                ]
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._seen.clear()

    def _keep(self, tensor: Tensor) -> Tensor:
        self._count(tensor)
        return tensor

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._parameters or storage.data_ptr() in self._seen:
            return
        # Held, so that no other tensor can take its address while counting.
        self._seen[storage.data_ptr()] = tensor
        self.total += storage.nbytes()


def saved_bytes(module: nn.Module, compute: Callable[[], Any]) -> int:
    """Bytes kept for the backward pass of what ``compute`` returns."""
    with SavedBytes(module) as saved, torch.enable_grad():
        result = compute()
    del result
    return saved.total


def build(flags: Sequence[str], vocabulary: int, on_meta: bool = False) -> tuple[Any, Any]:
    """Model and configuration of fairseq's flags (``--arch ...``) over a dictionary of so many symbols.

    No data is read; on the meta device, the weights take no memory. Raises UsageError on flags that fairseq
    does not know or that do not fit together.
    """
    if not any(flag == "--arch" or flag.startswith("--arch=") for flag in flags):
        raise UsageError("--arch must name an architecture: got none (or give a checkpoint with --path)")
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parser = options.get_training_parser(default_task="language_modeling")
            # The data folder, which is positional, is never looked at.
            args = options.parse_args_and_arch(parser, ["unread", *flags])
    except SystemExit as stop:
        raise UsageError(errors.getvalue().strip().splitlines()[-1].split("error: ")[-1]) from stop
    cfg = convert_namespace_to_omegaconf(args)
    return build_model(cfg, vocabulary, on_meta), cfg


def build_model(cfg: Any, vocabulary: int, on_meta: bool = False) -> Any:
    """The model of a configuration over a dictionary of so many symbols."""
    task = TASK_REGISTRY[cfg.task._name](cfg.task, _dictionary(vocabulary))
    with torch.device("meta" if on_meta else "cpu"):
        return task.build_model(cfg.model)


def _dictionary(vocabulary: int) -> Dictionary:
    dictionary = Dictionary()
    if vocabulary <= len(dictionary):
        raise UsageError(f"--vocabulary must be more than the {len(dictionary)} special symbols: got {vocabulary}")
    for number in range(vocabulary - len(dictionary)):
        dictionary.add_symbol(f"w{number}")
    return dictionary


def training_loss(model: Any, batch: int, tokens: int, seed: int = 1) -> Tensor:
    """The summed loss of random tokens (B, T), as fairseq's cross_entropy or adaptive_loss computes it."""
    generator = torch.Generator().manual_seed(seed)
    symbols = len(model.decoder.dictionary)
    source = torch.randint(4, symbols, (batch, tokens), generator=generator)
    target = torch.randint(4, symbols, (batch, tokens), generator=generator)
    device = next(model.parameters()).device
    sample = {"net_input": {"src_tokens": source.to(device)}, "target": target.to(device), "ntokens": batch * tokens}
    kind = CrossEntropyCriterion if getattr(model.decoder, "adaptive_softmax", None) is None else AdaptiveLoss
    return kind(SimpleNamespace(target_dictionary=model.decoder.dictionary), False)(model, sample)[0]


def step_bytes(model: Any, batch: int, tokens: int) -> int:
    """Bytes that a training step on (B, T) tokens keeps for its backward pass.

    More than two samples are not run: each further one keeps as much as the second does.
    """
    model.train()
    few = [
        saved_bytes(model, lambda samples=samples: training_loss(model, samples, tokens))  # type: ignore[misc]
        for samples in range(1, min(batch, 2) + 1)
    ]
    return few[0] + (batch - 1) * (few[-1] - few[0])


def cuda_peak(model: Any, batch: int, tokens: int) -> int:
    """torch.cuda.max_memory_allocated of a training step without optimizer: the paper's own measure."""
    model.train()
    device = next(model.parameters()).device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    training_loss(model, batch, tokens).backward()
    torch.cuda.synchronize(device)
    model.zero_grad(set_to_none=True)
    return int(torch.cuda.max_memory_allocated(device))


def forward_seconds(module: nn.Module, x: Tensor, repeats: int = 5) -> float:
    """The shortest of several forward passes over x, in training mode, after one to warm up."""
    module.train()
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        module(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def weight_bytes(parameters: int, element: int) -> dict[str, float]:
    """Bytes of weights, gradients and Adam's state; in half precision Adam keeps single precision copies."""
    copies = 4 if element == 2 else 0
    return {
        "weights": float(element * parameters),
        "gradients": float(element * parameters),
        "Adam": float((8 + copies) * parameters),
    }
