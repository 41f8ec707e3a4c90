"""The parts that validated flags describe; each parameter knows its group."""

from __future__ import annotations

from typing import NamedTuple

from fairseq.data import Dictionary
from torch import nn

from fairseq_ms.core.hierarchical.chunk_decoder import LSTMDecoder, TransformerDecoder
from fairseq_ms.core.hierarchical.chunk_encoder import ChunkEncoder, LSTMEncoder, MLPEncoder
from fairseq_ms.core.hierarchical.chunk_main import LSTMMain, TransformerMain
from fairseq_ms.core.hierarchical.segmentation import Segmentation
from fairseq_ms.core.layers import LayerConfig, TransformerStack
from fairseq_ms.lm.config import fill_in_positions
from fairseq_ms.models.haed.config import CHUNK_DECODER_DEFAULTS, MAIN_DEFAULTS, HAEDConfig, resolve, separators


class Hierarchy(NamedTuple):
    """What both phases of training have."""

    segmentation: Segmentation
    encoder: ChunkEncoder
    main: TransformerMain | LSTMMain


def _layers(cfg: HAEDConfig, dim: int, ffn_dim: int, heads: int, head_dim: int | None = None) -> LayerConfig:
    return LayerConfig(
        dim=dim,
        ffn_dim=ffn_dim,
        heads=heads,
        head_dim=head_dim,
        dropout=cfg.dropout,
        attention_dropout=cfg.attention_dropout,
        activation_dropout=cfg.activation_dropout,
        activation=str(cfg.activation_fn),
        recompute=str(cfg.recompute) == "pointwise",
        checkpoint=cfg.checkpoint_activations,
    )


def build_hierarchy(cfg: HAEDConfig, dictionary: Dictionary) -> Hierarchy:
    """Segmentation, encoder and main model of a validated configuration; each parameter knows its group."""
    length, vocabulary, pad = cfg.max_segment_len, len(dictionary), dictionary.pad()
    sizes = resolve(cfg, "main", MAIN_DEFAULTS)
    encoding = cfg.decoder_embed_dim - sizes["position_embed_dim"]
    encoder: ChunkEncoder
    if str(cfg.encoder) == "mlp":
        encoder = MLPEncoder(vocabulary, pad, cfg.token_embed_dim, encoding, cfg.encoder_units or 256, length)
    else:
        encoder = LSTMEncoder(vocabulary, pad, cfg.token_embed_dim, encoding, cfg.encoder_units or 1024)
    # The first token is a chunk by itself, a word may be a single token, and the first phase reads one token more,
    # the last target.
    most = fill_in_positions(cfg) + int(cfg.add_bos_token)
    chunks = 1 + (most if str(cfg.segmentation) == "words" else -(-most // length))
    main: TransformerMain | LSTMMain
    if str(cfg.main) == "transformer":
        config = _layers(
            cfg,
            cfg.decoder_embed_dim,
            sizes["decoder_ffn_embed_dim"],
            sizes["decoder_attention_heads"],
            sizes["attention_head_dim"],
        )
        main = TransformerMain(config, sizes["decoder_layers"], chunks, sizes["position_embed_dim"])
    else:
        main = LSTMMain(
            cfg.decoder_embed_dim,
            sizes["main_units"],
            chunks,
            sizes["position_embed_dim"],
            cfg.dropout,
            str(cfg.recompute) == "pointwise",
        )
    segmentation = Segmentation(str(cfg.segmentation), length, separators(cfg, dictionary), vocabulary, pad)
    in_group("encoder", encoder)
    in_group("main", main)
    return Hierarchy(segmentation, encoder, main)


def build_chunk_decoder(cfg: HAEDConfig, dictionary: Dictionary) -> LSTMDecoder | TransformerDecoder:
    """The chunk decoder of a validated configuration; each parameter knows its group."""
    vocabulary, pad, dim, units = len(dictionary), dictionary.pad(), cfg.decoder_embed_dim, cfg.decoder_units
    chunk_decoder: LSTMDecoder | TransformerDecoder
    if str(cfg.decoder) == "lstm":
        recompute = str(cfg.recompute) == "pointwise"
        chunk_decoder = LSTMDecoder(vocabulary, pad, cfg.token_embed_dim, dim, units, cfg.dropout, recompute)
    else:
        sizes = resolve(cfg, "decoder", CHUNK_DECODER_DEFAULTS)
        config = _layers(cfg, units, cfg.local_ffn_embed_dim or 4 * units, sizes["local_attention_heads"])
        chunk_decoder = TransformerDecoder(
            vocabulary, pad, cfg.token_embed_dim, dim, config, sizes["local_layers"], cfg.max_segment_len
        )
    in_group("decoder", chunk_decoder)
    return chunk_decoder


def in_group(name: str, module: nn.Module) -> None:
    """Name the group of parameters to which fairseq's composite optimizer gives settings of their own."""
    for parameter in module.parameters():
        parameter.param_group = name  # type: ignore[attr-defined]


def initialise(module: nn.Module, std: float | None) -> None:
    """Draw weights from a normal distribution: those of transformers with 0.02, or all of them with ``std``."""
    for part in module.modules():
        wanted = std if std is not None else 0.02 if isinstance(part, TransformerStack) else None
        if wanted is None:
            continue
        for name, parameter in part.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=wanted)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if std is not None:
            break
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            nn.init.zeros_(part.weight[part.padding_idx])
