"""``transformer_xl``: segments that see the states of the segments before them (Transformer-QL, Figure 3)."""

from dataclasses import dataclass, field

from fairseq.data import Dictionary
from fairseq.models import register_model
from torch import Tensor

from fairseq_ms.core.layers import TokenEmbedding, TypedList
from fairseq_ms.core.streaming.layer import shift_all
from fairseq_ms.core.streaming.memory import Memory, Mems
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.decoding.transformer_xl import TransformerXLState
from fairseq_ms.lm.config import require
from fairseq_ms.lm.streaming import StreamingConfig, StreamingDecoder, StreamingLanguageModel


@dataclass
class TransformerXLConfig(StreamingConfig):
    """Flags of ``transformer_xl``."""

    decoder_layers: int = field(default=8, metadata={"help": "number of layers"})


class TransformerXLDecoder(StreamingDecoder):
    """Layers over [memory, segment]; the memory of a layer is that of its input."""

    def __init__(self, cfg: TransformerXLConfig, dictionary: Dictionary, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.layers = TypedList(self.make_layer() for _ in range(cfg.decoder_layers))

    def forward_segment(self, x_BTD: Tensor, mems: Mems, positions: Tensor) -> tuple[Tensor, Mems, Tensor | None]:
        """Transformer-QL, Figure 3, lines 7 to 10."""
        s, moving = x_BTD, {}
        for index, layer in enumerate(self.layers):
            moving[f"layer{index}"] = s
            s = layer(s, mems[f"layer{index}"], positions)
        return s, shift_all(moving, mems), None

    def memory_lengths(self) -> dict[str, int]:
        return {f"layer{index}": self.mem_len for index in range(len(self.layers))}

    def memory_reach(self) -> int:
        return len(self.layers) * -(-self.mem_len // self.segment_len)

    def state_after(self, memory: Memory) -> DecodingState:
        return TransformerXLState(self, memory)


@register_model("transformer_xl", dataclass=TransformerXLConfig)
class TransformerXLLanguageModel(StreamingLanguageModel):
    """Transformer-XL: segment recurrence and relative positions."""

    decoder_class = TransformerXLDecoder

    @classmethod
    def validate(cls, cfg: TransformerXLConfig, task: object) -> None:
        super().validate(cfg, task)
        require(cfg.decoder_layers > 0, f"--decoder-layers must be at least 1: got {cfg.decoder_layers}")
