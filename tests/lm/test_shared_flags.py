"""The flags that architectures share: each of them takes effect in every architecture that has it, or is refused."""

from typing import Any

import pytest
import torch
from fairseq import options
from fairseq.models import MODEL_DATACLASS_REGISTRY
from torch import Tensor

from fairseq_ms.errors import UsageError
from fairseq_ms.tools.saved_bytes import saved_bytes
from tests.registry import ARCHITECTURES, build, dictionary

# Two values of each; they are to differ in what the model says, or in what is kept for backward.
VALUES: dict[str, tuple[Any, Any]] = {
    "decoder_attention_heads": (2, 4),
    "decoder_ffn_embed_dim": (24, 40),
    "activation_fn": ("gelu", "relu"),
    "dropout": (0.0, 0.3),
    "attention_dropout": (0.0, 0.3),
    "activation_dropout": (0.0, 0.3),
    "embedding_init_std": (0.1, 0.4),
    "positions": ("rotary", "none"),
    "rotary_base": (10000.0, 50.0),
    "norm": ("layer", "rms"),
    "norm_eps": (1e-5, 0.1),
    "no_decoder_final_norm": (False, True),
    "attention_head_dim": (8, 4),
    "unpredicted_symbols": (None, "<s> <unk>"),
    "decoder_normalize_after": (False, True),
    "qk_norm": ("True", "scaled"),
    "short_conv": (0, 3),
    "sinks": (False, True),
    "kv_heads": (1, 2),
    "scale_embedding": (False, True),
    "init_residual": ("scaled", "zero"),
    "checkpoint_activations": (False, True),
    "recompute": ("pointwise", "none"),
}
SIZES = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_attention_heads": 2, "tokens_per_sample": 16}
DROPPED = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
# With a transformer, because they refuse the flags of what they are not made of.
CHUNKS = {
    **{"main": "transformer", "decoder_layers": 1, "position_embed_dim": 4, "encoder_units": 8, "decoder_units": 6},
    **{"segmentation": "fixed", "criterion": "cross_entropy"},
}
OWN: dict[str, dict[str, Any]] = {
    "retina_lm": {"scale_windows": "1x=0:4,2x=4:8"},
    "multiscale_topdown": {"scale_layers": "4x=1,1x=1"},
    "multiscale_bottomup": {"scale_layers": "4x=1,1x=1"},
    "coarse_lm": {"scale_layers": "4x=2"},
    "haed": CHUNKS,
    "hred": CHUNKS,
}
CASES = [
    (arch, flag)
    for arch in ARCHITECTURES
    for flag in VALUES
    if flag in MODEL_DATACLASS_REGISTRY[arch].__dataclass_fields__
]


def trained(arch: str, **flags: Any) -> tuple[list, int]:
    """Logits of a training forward, and the bytes that it keeps; drawn from one seed, whatever the flags."""
    has = MODEL_DATACLASS_REGISTRY[arch].__dataclass_fields__
    shared = {name: value for name, value in {**SIZES, **DROPPED}.items() if name in has or name in SIZES}
    torch.manual_seed(3)
    model = build(arch, {**shared, "init_std": 0.4, **OWN.get(arch, {}), **flags}, dictionary(9)).train()
    for name, parameter in model.named_parameters():
        if name.endswith((".temperature", ".short_conv.weight")):  # which start from what changes nothing
            torch.nn.init.normal_(parameter)
    tokens = torch.arange(32).view(2, 16) % 9 + 4
    torch.manual_seed(5)
    logits: list[Tensor] = []

    def forward() -> Tensor:
        result = model(tokens)[0]
        logits.append(result.detach().clone())
        return result

    kept = saved_bytes(forward, model)
    return logits[0].tolist(), kept


def effect(arch: str, flag: str, value: Any) -> object:
    """What the flag does to a training forward, or the sentence that refuses it."""
    try:
        return trained(arch, **{flag: value})
    except UsageError as error:
        sentence = str(error)
    assert f"--{flag.replace('_', '-')}" in sentence
    return sentence


@pytest.mark.parametrize(
    ("given", "stored"), [([], "False"), (["--qk-norm"], "True"), (["--qk-norm", "scaled"], "scaled")]
)
@pytest.mark.parametrize("after", [["--lr", "1", "DATA"], ["DATA"], ["DATA", "--lr", "1"]])
def test_a_flag_of_one_word_or_none_takes_no_other(given: list[str], stored: str, after: list[str]) -> None:
    parser = options.get_training_parser("language_modeling")
    args = options.parse_args_and_arch(parser, ["--arch", "vanilla_lm", *given, *after])
    assert (args.data, getattr(args, "qk_norm", "False")) == ("DATA", stored)


@pytest.mark.parametrize(("arch", "flag"), CASES)
def test_a_shared_flag_takes_effect_or_is_refused(arch: str, flag: str) -> None:
    one, other = VALUES[flag]
    assert effect(arch, flag, one) != effect(arch, flag, other)
