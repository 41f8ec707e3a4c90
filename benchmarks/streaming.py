"""Training steps of the streaming models: beside TransfoXL, at Transformer-QL's sizes, and against context.

The peer is in transformers up to 4.35: ``pip install --no-deps --target FOLDER -r requirements/transfo-xl.txt``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from fairseq.models import FairseqLanguageModel
from torch import Tensor

from benchmarks.device import peak
from benchmarks.peers import Shape, build
from benchmarks.table import DTYPES, GB, TIME, Cell, NotInstalledError, Options, Row, Table, Work, assert_parity, to
from benchmarks.training import COLUMNS, training_work
from fairseq_ms.papers.plot import context
from fairseq_ms.presets.registry import PRESETS
from fairseq_ms.tools import untrained
from fairseq_ms.tools.saved_bytes import saved_bytes
from fairseq_ms.tools.training_step import training_loss, training_sample

if TYPE_CHECKING:
    from transformers import TransfoXLModel

STREAMS = 32
PAPER = Shape(dim=512, ffn_dim=2048, heads=8, length=16, vocabulary=1000, layers=8)
TINY = Shape(dim=16, ffn_dim=32, heads=2, length=4, vocabulary=50, layers=3)
# Eight layers in float32; outputs of a pre-LN stack are of order 10.
TOLERANCE = 1e-3
XL, COMPRESSIVE, QL, PEER = "transformer_xl", "compressive_transformer", "transformer_ql", "TransfoXL (transformers)"
# Symbols of the data sets (Transformer-QL, Table 4).
VOCABULARY = {"simplebooks92": 98_304, "wt103": 267_735}
SMALL = ["--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "2"]
SMALL += ["--adaptive-input-cutoff", "20,40", "--adaptive-softmax-cutoff", "20,40"]
# Streams of a step, and their width.
CONTEXT_STREAMS, DIM = 8, 256


def transfo_xl(shape: Shape, normalize_before: bool = True) -> TransfoXLModel:
    """Hugging Face's model of this shape with a memory as long as the segment; NotInstalledError without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers import TransfoXLConfig, TransfoXLModel
        except ImportError as error:
            raise NotInstalledError("transformers 4.35, the last with TransfoXL") from error
        config = TransfoXLConfig(
            vocab_size=shape.vocabulary,
            cutoffs=[],
            d_model=shape.dim,
            d_embed=shape.dim,
            n_head=shape.heads,
            d_head=shape.dim // shape.heads,
            d_inner=shape.ffn_dim,
            div_val=1,
            pre_lnorm=normalize_before,
            n_layer=shape.layers,
            mem_len=shape.length,
            clamp_len=-1,
            untie_r=False,
            same_length=False,
            dropout=shape.dropout,
            dropatt=shape.dropout,
        )
        return TransfoXLModel(config)


def copy_weights(ours: FairseqLanguageModel, theirs: TransfoXLModel) -> None:
    """Give Hugging Face's model the weights of our ``transformer_xl`` of the same shape."""
    decoder = ours.decoder.core
    pairs = [(theirs.word_emb.emb_layers[0].weight, decoder.embed.words.weight)]
    pairs += list(zip((theirs.r_w_bias, theirs.r_r_bias), (decoder.u, decoder.v)))
    for their, our in zip(theirs.layers, decoder.layers):
        attention, ffn = their.dec_attn, their.pos_ff
        modules = [
            (attention.qkv_net, our.attention.qkv),
            (attention.r_net, our.attention.position),
            (attention.o_net, our.attention.out),
            (attention.layer_norm, our.attention.norm or our.after_attention),
            (ffn.CoreNet[0], our.ffn.up),
            (ffn.CoreNet[3], our.ffn.down),
            (ffn.layer_norm, our.ffn.norm or our.after_ffn),
        ]
        for their_module, our_module in modules:
            pairs += list(zip(their_module.parameters(), our_module.parameters(), strict=True))
    with torch.no_grad():
        for their_weight, our_weight in pairs:
            their_weight.copy_(our_weight)


def streaming_model(arch: str, shape: Shape, **flags: object) -> FairseqLanguageModel:
    """One of our models at this shape, its window twice the segment, pre-LN."""
    settings = {
        "decoder_normalize_before": True,
        "activation_fn": "relu",
        "activation_dropout": shape.dropout,
        "share_decoder_input_output_embed": True,
        "mem_len": shape.length,
        **flags,
    }
    return build(arch, shape, **settings).train()


class Steps:
    """Training steps of one model on the second segment of a stream, up to the features, without the vocabulary."""

    def __init__(self, name: str, shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        layers, half = shape.layers, shape.length // 2
        coarse = layers * 3 // 8
        flags: dict[str, dict[str, object]] = {
            XL: {"decoder_layers": layers},
            COMPRESSIVE: {"decoder_layers": layers, "mem_len": half, "compressed_mem_len": half},
            QL: {"scale_layers": f"1x={coarse},2x={coarse}", "output_layers": layers - 2 * coarse},
        }
        self.peer = transfo_xl(shape) if name == PEER else None
        ours = streaming_model(XL if name == PEER else name, shape, **flags[XL if name == PEER else name])
        if self.peer is not None:
            copy_weights(ours, self.peer)
        self.model = (ours if self.peer is None else self.peer).to(device, dtype).train()
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(4, shape.vocabulary, (2, STREAMS, shape.length), generator=generator).to(device)
        with torch.no_grad():
            first = self.tokens[0]
            self.memory = ours.decoder.core.stream(first, None)[1] if self.peer is None else self.peer(first).mems

    def output(self) -> Tensor:
        """Features (B, T, D) of the second segment, and whatever else the model trains on, in one number."""
        if self.peer is not None:
            return self.peer(self.tokens[1], mems=self.memory).last_hidden_state.sum()
        features, _, loss = self.model.decoder.core.stream(self.tokens[1], self.memory)
        return features.sum() if loss is None else features.sum() + loss.mean()

    def run(self) -> None:
        """Forward and backward."""
        self.model.zero_grad()
        self.output().backward()


def tables(options: Options) -> list[Table]:
    """Three tables."""
    return [_beside_transfo_xl(options), _wide(options), _context(options)]


def _beside_transfo_xl(options: Options) -> Table:
    size = TINY if options.quick else PAPER

    def work(name: str, dropout: float, precision: str) -> Work:
        steps = Steps(name, replace(size, dropout=dropout), options.device, DTYPES[precision])

        def others() -> Mapping[str, Cell]:
            return {"kept": saved_bytes(steps.output, steps.model) / 1e6, "peak": peak(steps.run, options) / GB}

        return Work(steps.run, others=others)

    rows = [
        Row((name, f"{dropout:g}", precision), partial(work, name, dropout, precision), f"{dropout}, {precision}")
        for precision in options.precisions
        for dropout in (0.0, 0.1)
        for name in (XL, COMPRESSIVE, QL, PEER)
    ]
    about = (
        f"{size.layers} layers of {size.dim}, segment and memory {size.length}, batch {STREAMS}, pre-LN, forward and "
        "backward without the output layer."
    )
    ratios = {
        "to TransfoXL": lambda settings: to(settings, model=PEER),
        "to transformer_xl": lambda settings: to(settings, model=XL),
    }
    columns = {TIME: "ms a step", "kept": "MB kept", "peak": "peak, GB"}
    settings = ["model", "dropout", "precision"]
    return Table("streaming", "Streaming models", about, settings, columns, rows, 1e3, ratios, parity)


@torch.no_grad()
def parity() -> str:
    """That ours and the peer's two segments agree; without the peer, ours whole and in pieces."""
    steps = Steps(XL, PAPER)
    model, tokens = steps.model.eval(), steps.tokens
    try:
        peer = Steps(PEER, PAPER)
    except NotInstalledError:
        peer = None
    whole = torch.cat(list(tokens), dim=1)
    ours = model.decoder.core.stream(whole, None)[0]
    if peer is None:
        memory = model.decoder.core.stream(whole[:, :3], None)[1]
        other, what = model.decoder.core.stream(whole[:, 3:], memory)[0], "one call and two of transformer_xl"
        ours = ours[:, 3:]
    else:
        peer.model.eval()
        first = peer.model(tokens[0])
        second = peer.model(tokens[1], mems=first.mems)
        other = torch.cat([first.last_hidden_state, second.last_hidden_state], dim=1)
        what = "features of transformer_xl and TransfoXL with the same weights"
    return f"{what} agree to {assert_parity(what, ours, other, TOLERANCE):.1e}"


def _wide(options: Options) -> Table:
    def work(name: str, precision: str) -> Work:
        cfg = untrained.parse(["--arch", name, *(SMALL if options.quick else [])])
        vocabulary = 97 if options.quick else VOCABULARY[next(data for data in VOCABULARY if data in name)]
        model = untrained.build_model(cfg, vocabulary).to(options.device, DTYPES[precision]).train()
        tokens = int(cast(int, PRESETS[name].values["tokens_per_sample"]))
        rows = 2 if options.quick else STREAMS
        return training_work(model, cast(Any, training_sample(model, rows, tokens)), training_loss, options)

    rows = [
        Row((name, precision), partial(work, name, precision), f"{name}, {precision}")
        for precision in options.precisions
        for name, preset in PRESETS.items()
        if preset.values.get("decoder_embed_dim") == 1536 and (not options.quick or "simplebooks92" in name)
    ]
    about = (
        f"The presets that are 1,536 wide, {STREAMS} streams, with their segments and dropout, full memories, adaptive "
        "softmax over the symbols of SimpleBooks-92 (98,304) and WikiText-103 (267,735)."
    )
    title = "Training at Transformer-QL's sizes"
    return Table("transformer-ql", title, about, ["preset", "precision"], COLUMNS, rows, 1e6)


def _context(options: Options) -> Table:
    dim, streams = (64, 2) if options.quick else (DIM, CONTEXT_STREAMS)
    first = next(iter(context.MODELS))

    def work(name: str, segment: int, precision: str) -> Work:
        flags = context.MODELS[name]
        step = context.Step(flags, segment, dim, streams, options.device, DTYPES[precision])
        return Work(step.run, streams, lambda: {"context": step.context, "kept": step.kept() / streams / 1e6})

    rows = [
        Row((name, str(segment), precision), partial(work, name, segment, precision), f"{segment}, {precision}")
        for precision in options.precisions
        for segment in ((4,) if options.quick else (4, 16, 64))
        for name in context.MODELS
    ]
    about = (
        f"As `fairseq-ms plot context`: d = {dim}, {streams} streams a step, numbers a stream (Transformer-QL, "
        "Section 2.4)."
    )
    columns = {"context": "context, tokens", TIME: "ms", "kept": "MB kept"}
    settings = ["model", "segment = memory", "precision"]
    ratios = {"to Transformer-XL": lambda settings: to(settings, model=first)}
    return Table("context", "What context costs", about, settings, columns, rows, 1e3, ratios)
