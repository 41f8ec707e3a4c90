"""What the streaming models cost, against each other and against Hugging Face's TransfoXL where it is installed.

The peer is in transformers up to 4.35: ``pip install --no-deps --target FOLDER -r requirements/transfo-xl.txt``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from fairseq.models import FairseqLanguageModel
from torch import Tensor

from benchmarks.peers import Shape, build
from benchmarks.runner import Contestant, Options, Section, assert_parity
from fairseq_ms.analysis.saved_bytes import saved_bytes

if TYPE_CHECKING:
    from transformers import TransfoXLModel

Result = TypeVar("Result")

NAME = "streaming"
HELP = "streaming models at one window: a training step and what it keeps, beside Hugging Face's TransfoXL"

ROWS = 32
PAPER = Shape(dim=512, ffn_dim=2048, heads=8, length=16, vocabulary=1000, layers=8)
TINY = Shape(dim=16, ffn_dim=32, heads=2, length=4, vocabulary=50, layers=3)
# Eight layers in float32; outputs of a pre-LN stack are of order 10.
TOLERANCE = 1e-3
PEER = "TransfoXL (transformers)"


def transfo_xl(shape: Shape, normalize_before: bool = True) -> TransfoXLModel | None:
    """Hugging Face's model of this shape with a memory as long as the segment, or None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers import TransfoXLConfig, TransfoXLModel
        except ImportError:
            return None
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
        for to, source in modules:
            pairs += list(zip(to.parameters(), source.parameters(), strict=True))
    with torch.no_grad():
        for to, weight in pairs:
            to.copy_(weight)


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
    """Training steps on the second segment of a stream, up to the features, without the vocabulary."""

    def __init__(self, shape: Shape, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.shape = shape
        layers, half = shape.layers, shape.length // 2
        coarse = layers * 3 // 8
        self.models: dict[str, FairseqLanguageModel] = {
            "transformer_xl": streaming_model("transformer_xl", shape, decoder_layers=layers),
            "compressive_transformer": streaming_model(
                "compressive_transformer", shape, decoder_layers=layers, mem_len=half, compressed_mem_len=half
            ),
            "transformer_ql": streaming_model(
                "transformer_ql",
                shape,
                scale_layers=f"1x={coarse},2x={coarse}",
                output_layers=layers - 2 * coarse,
            ),
        }
        self.peer = transfo_xl(shape)
        if self.peer is not None:
            copy_weights(self.models["transformer_xl"], self.peer)
            self.peer.to(device, dtype).train()
        for model in self.models.values():
            model.to(device, dtype)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(4, shape.vocabulary, (2, ROWS, shape.length), generator=generator).to(device)
        self.memories = {name: self._first(model) for name, model in self.models.items()}
        with torch.no_grad():
            self.peer_memory = self.peer(self.tokens[0]).mems if self.peer is not None else None

    def _first(self, model: FairseqLanguageModel) -> object:
        with torch.no_grad():
            return model.decoder.core.stream(self.tokens[0], None)[1]

    def output(self, name: str) -> Tensor:
        """Features (B, T, D) of a model's second segment, and whatever else it trains on, in one number."""
        if name == PEER:
            return self.peer(self.tokens[1], mems=self.peer_memory).last_hidden_state.sum()
        features, _, loss = self.models[name].decoder.core.stream(self.tokens[1], self.memories[name])
        return features.sum() if loss is None else features.sum() + loss.mean()

    def module(self, name: str) -> FairseqLanguageModel | TransfoXLModel:
        return self.peer if name == PEER else self.models[name]

    def step(self, name: str) -> None:
        self.module(name).zero_grad()
        self.output(name).backward()

    def kept(self, name: str) -> float:
        return float(saved_bytes(lambda: self.output(name), self.module(name)))

    def names(self) -> list[str]:
        return ([PEER] if self.peer is not None else []) + list(self.models)

    def parity(self) -> str:
        """That ours and the peer's two segments agree; without the peer, ours whole and in pieces."""
        model = self.models["transformer_xl"].eval()
        with torch.no_grad():
            whole = torch.cat(list(self.tokens), dim=1)
            ours = model.decoder.core.stream(whole, None)[0]
            if self.peer is None:
                _, memory, _ = model.decoder.core.stream(whole[:, :3], None)
                other, what = model.decoder.core.stream(whole[:, 3:], memory)[0], "one call and two"
                ours = ours[:, 3:]
            else:
                self.peer.eval()
                first = self.peer(self.tokens[0])
                second = self.peer(self.tokens[1], mems=first.mems)
                other = torch.cat([first.last_hidden_state, second.last_hidden_state], dim=1)
                what = "features of transformer_xl and TransfoXL with the same weights"
                self.peer.train()
        model.train()
        return f"{what}: {assert_parity(what, ours, other, TOLERANCE):.1e}"


def sections(options: Options) -> Iterable[Section]:
    """Time and bytes of a step, without and with dropout."""
    for dropout in (0.0, 0.1):
        size = TINY if options.quick else PAPER
        steps = Steps(Shape(**{**vars(size), "dropout": dropout}))
        names = steps.names()
        title = f"{size.layers} layers, segment and memory {size.length}, batch {ROWS}, {steps.shape}"
        yield Section(
            f"streaming models, forward and backward up to the vocabulary, {title}",
            "ms a step",
            [Contestant(name, _bind(steps.step, name), _goal(name, 0.82, names)) for name in names],
            names[0],
            steps.parity,
            scale=1e3,
        )
        yield Section(
            f"streaming models, bytes kept for backward, {title}",
            "MB",
            [Contestant(name, _bind(steps.kept, name), _goal(name, 0.8, names)) for name in names],
            names[0],
            steps.parity,
            measure="value",
            scale=1e-6,
        )


def _goal(name: str, goal: float, names: list[str]) -> float | None:
    return goal if name == "transformer_xl" and names[0] == PEER else None


def _bind(function: Callable[[str], Result], name: str) -> Callable[[], Result]:
    return lambda: function(name)
