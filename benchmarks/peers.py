"""The models that benchmarks compare: ours by their registered names, fairseq's own, and Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, BaseFairseqModel, FairseqLanguageModel
from fairseq.models.transformer_lm import base_lm_architecture
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from torch import Tensor, nn

from benchmarks.table import NotInstalledError
from fairseq_ms.criterions.linear_cross_entropy import LinearCrossEntropyCriterion
from fairseq_ms.lm.streaming import StreamingLanguageModel
from fairseq_ms.presets.registry import PRESETS
from fairseq_ms.tasks.streaming_language_modeling import StreamingLanguageModelingTask
from fairseq_ms.tools.training_step import Sample


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
            f"dropout {self.dropout:g}"
        )


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


def huggingface_gpt2(shape: Shape) -> nn.Module:
    """Hugging Face's GPT-2 of this shape; NotInstalledError where ``transformers`` cannot be imported."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except (ImportError, OSError) as error:
        # OSError where it finds another package, such as torchaudio, of another build than torch's.
        raise NotInstalledError("transformers") from error
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
    made: nn.Module = GPT2LMHeadModel(config)
    return made


# Layers are named coarse to fine, as the paper does.
MULTISCALE: dict[str, tuple[str, dict[str, object]]] = {
    "topdown 7,7,8,8": ("multiscale_topdown", {"scale_layers": "64x=7,16x=7,4x=8,1x=8"}),
    "topdown 2,4,8,12": ("multiscale_topdown", {"scale_layers": "64x=2,16x=4,4x=8,1x=12"}),
    "bottomup 8,9,9": ("multiscale_bottomup", {"scale_layers": "16x=8,4x=9,1x=9"}),
    "retina 12": ("retina_lm", {"decoder_layers": 12}),
    "retina 14": ("retina_lm", {"decoder_layers": 14}),
}
FAIRSEQ, VANILLA, GPT2 = "fairseq transformer_lm", "vanilla", "Hugging Face GPT-2"


def build_model(name: str, shape: Shape, **flags: object) -> nn.Module:
    """A model by its name in the tables: fairseq's, Hugging Face's, ours, or a preset at these sizes."""
    if name == FAIRSEQ:
        return fairseq_lm(shape)
    if name == GPT2:
        return huggingface_gpt2(shape)
    if name == VANILLA:
        return build("vanilla_lm", shape, decoder_layers=shape.layers, **flags)
    if name in MULTISCALE:
        arch, own = MULTISCALE[name]
        return build(arch, shape, **own, **flags)
    return build(PRESETS[name].model, shape, **PRESETS[name].values, **flags)


def label(name: str, shape: Shape) -> str:
    """The model's name with its number of layers, where the name does not have it."""
    return f"{name} {shape.layers}" if name in (FAIRSEQ, VANILLA, GPT2) else name


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


Loss = Callable[[nn.Module, Sample], Tensor]


def linear_cross_entropy_loss(model: Any, sample: Sample) -> Tensor:
    """As ``language_model_loss``, computed as our ``linear_cross_entropy`` does."""
    task = SimpleNamespace(target_dictionary=model.decoder.dictionary)
    return LinearCrossEntropyCriterion(task, sentence_avg=False, label_smoothing=0.0)(model, {**sample})[0]


LOSSES: dict[str, Loss] = {
    "cross_entropy": language_model_loss,
    "linear_cross_entropy": linear_cross_entropy_loss,
}


def hidden_bytes(loss: Tensor) -> int:
    """Bytes of tensors that the graph of a loss holds beside autograd's own account of saved tensors.

    Such is a gradient that was computed in the forward pass. That of a parameter is left out, as are those that the
    backward pass computes: whichever of the two makes it, it is there when the backward pass begins to free memory.
    """
    found: dict[int, int] = {}
    for node in _nodes(loss.grad_fn):
        inputs = [getattr(before, "variable", None) for before, _ in node.next_functions]
        parameters = [tensor.shape for tensor in inputs if tensor is not None]
        for held in getattr(node, "__dict__", {}).values():
            if isinstance(held, Tensor) and held.shape not in parameters:
                found[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
    return sum(found.values())


def _nodes(root: Any) -> Iterator[Any]:
    """Every node of a graph once."""
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]
