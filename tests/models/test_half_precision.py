"""Training steps in half precision, with fairseq's scale of the loss and the presets' sizes of a batch."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from torch import Tensor

from fairseq_ms.core.compressive_transformer import reconstruction_loss
from fairseq_ms.lm.streaming import StreamingLanguageModel
from fairseq_ms.presets.registry import PRESETS
from fairseq_ms.tasks.streaming_language_modeling import StreamingLanguageModelingTask
from tests.helpers.corpus import random_flags
from tests.models.test_distributed import ADAPTIVE
from tests.registry import ARCHITECTURES, build, dictionary, random_case

# fairseq's --fp16-init-scale.
SCALE = 128.0
# Tokens in a batch of compressive_transformer_simplebooks2 (Appendix E).
TOKENS = 1024


class Scaled:
    """The optimizer's part in a backward pass, as fairseq's FP16Optimizer does it."""

    def backward(self, loss: Tensor) -> None:
        (loss * SCALE).backward()


def gradients(model: StreamingLanguageModel, words: Any, sample: dict[str, Any]) -> dict[str, Tensor]:
    """Those of a training step of the streaming task, (by parameter), without the scale."""
    task = StreamingLanguageModelingTask(
        SimpleNamespace(sample_break_mode="eos", tokens_per_sample=None, data=""), words
    )
    task.model = model
    task.train_step(sample, model, CrossEntropyCriterion(task, False), Scaled(), 0)
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.double() / SCALE
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_compression_is_trained_in_half_precision_as_in_full(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    words, lengths = dictionary(20), dict(PRESETS["compressive_transformer_simplebooks2"].values)
    flags = {name: lengths[name] for name in ("tokens_per_sample", "mem_len", "compressed_mem_len")}
    flags |= {"decoder_layers": 2, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 32, "decoder_attention_heads": 2}
    flags |= {"decoder_normalize_before": True, "init_std": 0.2, "dropout": 0.0, "attention_dropout": 0.0}
    model = build("compressive_transformer", flags, words).train()
    # Four segments a line: the first two find nothing but zeros to compress.
    tokens = torch.randint(4, len(words), (TOKENS // 16, 17))
    sample = {
        "net_input": {"src_tokens": tokens[:, :-1], "src_lengths": torch.full((TOKENS // 16,), 16)},
        "target": tokens[:, 1:].contiguous(),
        "ntokens": TOKENS,
    }
    found = gradients(copy.deepcopy(model).to(dtype), words, sample)
    expected = gradients(model, words, sample)
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
        if "compress" in name:
            # bfloat16 has eight bits.
            distance = (gradient - expected[name]).norm() / expected[name].norm()
            assert distance < 0.05, name


def test_differences_too_large_for_half_precision_when_squared_make_a_finite_loss() -> None:
    words = dictionary(5)
    flags = {"decoder_layers": 1, "decoder_embed_dim": 8, "decoder_attention_heads": 1, "tokens_per_sample": 4}
    layer = build("compressive_transformer", {**flags, "decoder_normalize_before": False}, words).decoder.core.layers[0]
    with torch.no_grad():
        layer.attention.qkv.weight.copy_(torch.eye(8).repeat(3, 1))
    layer.half()
    x = torch.full((2, 4, 8), 300.0, dtype=torch.float16)
    old = torch.full((2, 4, 8), -300.0, dtype=torch.float16)
    loss = reconstruction_loss(layer, x, old, -old[:, ::2])
    assert loss.tolist() == [600.0**2] * 2


@pytest.mark.parametrize(
    "arch", [arch for arch in ARCHITECTURES if "share_decoder_input_output_embed" in random_flags(arch)]
)
def test_an_adaptive_input_trains_under_autocast(arch: str) -> None:
    words = dictionary(9)
    model = build(arch, {**random_flags(arch), **ADAPTIVE}, words).train()
    tokens = torch.randint(4, len(words), (3, 12))
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        model(tokens)[0].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.decoder.core.embed.words.parameters())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cached_decoding_under_autocast_is_the_full_pass(arch: str) -> None:
    for seed in range(4):
        case = random_case(arch, seed)
        tokens, order = case.tokens(3, 11), torch.tensor([2, 0, 0, 1])
        exact = case.model.decoder.core.features(tokens)[order]
        with torch.inference_mode(), torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            full = case.model.decoder.core.features(tokens)[order]
            core = case.model.decoder.core
            state = core.new_state(3, 4)
            features = [core.features(tokens[:, :5], state)[order]]
            features += [core.features(tokens[:, t : t + 1], state)[order] for t in range(5, 8)]
            state.reorder(order)
            features += [core.features(tokens[order][:, t : t + 1], state) for t in range(8, 11)]
        # As far from each other as rounding to eight bits takes the full pass from single precision, or a little more.
        rounding = float((full - exact).abs().max())
        assert float((torch.cat(features, dim=1).float() - full).abs().max()) <= 3 * rounding
