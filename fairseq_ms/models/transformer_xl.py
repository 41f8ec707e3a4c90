"""``transformer_xl``: segments that see the states of the segments before them (Dai et al., 2019; Appendix A)."""

from dataclasses import dataclass, field
from typing import Any

from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.lm.config import require
from fairseq_ms.lm.streaming import StreamingConfig, StreamingDecoder, StreamingLanguageModel
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.streaming.memory import LayerRun


@dataclass
class TransformerXLConfig(StreamingConfig):
    """Flags of ``transformer_xl``."""

    decoder_layers: int = field(default=8, metadata={"help": "number of layers"})


class StackRun:
    """A stack of layers at work on one segment, of which ``length`` positions are done."""

    def __init__(self, layers: list[LayerRun]) -> None:
        self.layers = layers
        self.length = 0

    def reorder(self, order: Tensor) -> None:
        for layer in self.layers:
            layer.reorder(order)


class TransformerXLDecoder(StreamingDecoder):
    """Layers over [memory, segment]; the memory of a layer is that of its input."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.layers = nn.ModuleList(self.make_layer() for _ in range(cfg.decoder_layers))

    def memory_lengths(self) -> dict[str, int]:
        return {f"layer{number}": self.mem_len for number in range(len(self.layers))}

    def memory_reach(self) -> int:
        return len(self.layers) * -(-self.mem_len // self.segment_len)

    def past_of(self, states: dict[str, Tensor], number: int) -> Tensor:
        """What precedes the segment in a layer, (B, M, D)."""
        return states[f"layer{number}"]

    def begin(self, states: dict[str, Tensor], distances: dict[str, Tensor] | None = None) -> StackRun:
        pasts = [self.past_of(states, number) for number in range(len(self.layers))]
        positions_PD = self.sinusoids(pasts[0].size(1) + self.segment_len)
        return StackRun(
            [
                self.layer_run(f"layer{number}", layer, past, self.segment_len, positions_PD, distances)
                for number, (layer, past) in enumerate(zip(self.layers, pasts))
            ]
        )

    def advance(self, run: StackRun, x_BTD: Tensor) -> Tensor:
        run.length += x_BTD.size(1)
        for layer in run.layers:
            x_BTD = layer.feed(x_BTD)
        return x_BTD

    def finish(self, run: StackRun) -> tuple[dict[str, Tensor], Tensor | None]:
        states = {f"layer{n}": layer.shifted(self.segment_len) for n, layer in enumerate(run.layers)}
        return states, None


@register_model("transformer_xl", dataclass=TransformerXLConfig)
class TransformerXLLanguageModel(StreamingLanguageModel):
    """Transformer-XL: segment recurrence and relative positions."""

    decoder_class = TransformerXLDecoder

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        require(cfg.decoder_layers > 0, f"--decoder-layers must be at least 1: got {cfg.decoder_layers}")
