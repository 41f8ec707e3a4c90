"""The models that benchmarks compare: ours by their registered names, fairseq's own, and Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, BaseFairseqModel, FairseqLanguageModel
from fairseq.models.transformer_lm import base_lm_architecture
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from torch import Tensor, nn

from fairseq_ms.lm.streaming import StreamingLanguageModel
from fairseq_ms.tasks.streaming_language_modeling import StreamingLanguageModelingTask


@dataclass(frozen=True)
class Shape:
    """Sizes that all models of a comparison share."""

    dim: int = 768
    ffn_dim: int = 3072
    heads: int = 12
    length: int = 512
    vocabulary: int = 8000
    layers: int = 14
    dropout: float = 0.0

    def __str__(self) -> str:
        return (
            f"d={self.dim}, FFN {self.ffn_dim}, {self.heads} heads, T={self.length}, vocabulary {self.vocabulary}, "
            f"dropout {self.dropout:g}, float32"
        )

    def without_dropout(self) -> Shape:
        return replace(self, dropout=0.0)


PAPER = Shape()
TINY = Shape(dim=48, ffn_dim=96, heads=12, length=80, vocabulary=101, layers=2)


def language_modeling(shape: Shape) -> LanguageModelingTask:
    """fairseq's own task over a dictionary of made-up words."""
    words = Dictionary()
    for index in range(shape.vocabulary - len(words)):
        words.add_symbol(f"w{index}")
    cfg = LanguageModelingConfig(tokens_per_sample=shape.length, max_target_positions=shape.length)
    return LanguageModelingTask(cfg, words)


def build(arch: str, shape: Shape, **flags: object) -> FairseqLanguageModel:
    """A model of a registered architecture with random weights, the same ones every time."""
    cfg = MODEL_DATACLASS_REGISTRY[arch]()
    if arch == "transformer_lm":
        base_lm_architecture(cfg)
    settings = {
        "decoder_embed_dim": shape.dim,
        "decoder_ffn_embed_dim": shape.ffn_dim,
        "decoder_attention_heads": shape.heads,
        "dropout": shape.dropout,
        "attention_dropout": shape.dropout,
        "activation_fn": "gelu",
        "tokens_per_sample": shape.length,
        "max_target_positions": shape.length,
        "add_bos_token": False,
        **flags,
    }
    for name, value in settings.items():
        assert hasattr(cfg, name), f"{arch} has no flag {name}"
        setattr(cfg, name, value)
    torch.manual_seed(1)
    task = language_modeling(shape)
    if issubclass(MODEL_REGISTRY[arch], StreamingLanguageModel):
        task = StreamingLanguageModelingTask(task.args, task.source_dictionary)
    return MODEL_REGISTRY[arch].build_model(cfg, task)


def fairseq_lm(shape: Shape) -> FairseqLanguageModel:
    """fairseq's own ``transformer_lm``: pre-LN, GELU, learned positions, as ``vanilla_lm`` is."""
    return build(
        "transformer_lm",
        shape,
        decoder_layers=shape.layers,
        decoder_input_dim=shape.dim,
        decoder_output_dim=shape.dim,
        decoder_normalize_before=True,
        decoder_learned_pos=True,
        no_scale_embedding=True,
        tpu=False,
    )


def copy_weights(vanilla: FairseqLanguageModel, peer: FairseqLanguageModel) -> None:
    """Give fairseq's model the weights of our ``vanilla_lm`` of the same shape."""
    ours, theirs = vanilla.decoder.core, peer.decoder
    offset = theirs.embed_positions.padding_idx + 1
    with torch.no_grad():
        theirs.embed_tokens.weight.copy_(ours.embed.words.weight)
        theirs.embed_positions.weight[offset:].copy_(ours.embed.positions.weight)
        for theirs_layer, ours_layer in zip(theirs.layers, ours.stack.layers):
            attention = theirs_layer.self_attn
            projections = ("q_proj", "k_proj", "v_proj")
            weights = ours_layer.attention.qkv.weight.chunk(3)
            biases = ours_layer.attention.qkv.bias.chunk(3)
            for name, weight, bias in zip(projections, weights, biases):
                getattr(attention, name).weight.copy_(weight)
                getattr(attention, name).bias.copy_(bias)
            for target, source in (
                (attention.out_proj, ours_layer.attention.out),
                (theirs_layer.self_attn_layer_norm, ours_layer.attention.norm),
                (theirs_layer.fc1, ours_layer.ffn.up),
                (theirs_layer.fc2, ours_layer.ffn.down),
                (theirs_layer.final_layer_norm, ours_layer.ffn.norm),
            ):
                target.weight.copy_(source.weight)
                target.bias.copy_(source.bias)
        theirs.layer_norm.weight.copy_(ours.stack.norm.weight)
        theirs.layer_norm.bias.copy_(ours.stack.norm.bias)
        theirs.output_projection.weight.copy_(vanilla.decoder.project.weight)


def huggingface_gpt2(shape: Shape) -> nn.Module | None:
    """Hugging Face's GPT-2 of this shape, or None where ``transformers`` cannot be imported."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except (ImportError, OSError):
        # OSError where it finds another package, such as torchaudio, of another build than torch's.
        return None
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.length,
        n_embd=shape.dim,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.ffn_dim,
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        tie_word_embeddings=False,
        # fairseq's; the defaults are beyond a smaller vocabulary.
        bos_token_id=2,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


# Layers are named coarse to fine, as the paper does.
MULTISCALE: dict[str, tuple[str, dict[str, object]]] = {
    "topdown 7,7,8,8": ("multiscale_topdown", {"scale_layers": "64x=7,16x=7,4x=8,1x=8"}),
    "topdown 2,4,8,12": ("multiscale_topdown", {"scale_layers": "64x=2,16x=4,4x=8,1x=12"}),
    "bottomup 8,9,9": ("multiscale_bottomup", {"scale_layers": "16x=8,4x=9,1x=9"}),
    "retina 12": ("retina_lm", {"decoder_layers": 12}),
    "retina 14": ("retina_lm", {"decoder_layers": 14}),
}


def multiscale(name: str, shape: Shape, **flags: object) -> FairseqLanguageModel:
    """One of ``MULTISCALE``."""
    arch, own = MULTISCALE[name]
    return build(arch, shape, **own, **flags)


@contextmanager
def evaluation(*models: nn.Module) -> Iterator[None]:
    """The models in evaluation mode, and back in training mode afterwards."""
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model in models:
            model.train()


class Sample(TypedDict):
    """A batch as fairseq's criterions take it."""

    net_input: dict[str, Tensor]
    target: Tensor
    ntokens: int


def random_sample(shape: Shape, rows: int) -> Sample:
    """A batch as fairseq's criterions take it: random tokens, every position a target."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, shape.vocabulary, (rows, shape.length + 1), generator=generator)
    return {
        "net_input": {"src_tokens": tokens[:, :-1].contiguous(), "src_lengths": torch.full((rows,), shape.length)},
        "target": tokens[:, 1:].contiguous(),
        "ntokens": rows * shape.length,
    }


def language_model_loss(model: nn.Module, sample: Sample) -> Tensor:
    """The sum of the negative log probabilities of the targets, computed as fairseq's ``cross_entropy`` does."""
    if isinstance(model, BaseFairseqModel):
        output = model(**sample["net_input"])
        log_probs = model.get_normalized_probs(output, log_probs=True)
    else:
        log_probs = model(sample["net_input"]["src_tokens"]).logits.log_softmax(-1, dtype=torch.float32)
    return nn.functional.nll_loss(log_probs.flatten(0, 1), sample["target"].flatten(), reduction="sum")
