"""Language models in plain PyTorch: multi-scale Transformers, models with a memory, and hierarchical ones.

Each model has a configuration of its sizes, ``Vanilla`` and ``VanillaConfig`` for instance:

    model = Retina(RetinaConfig(vocab_size=8000, layers=6))
    logits, state = model(tokens)                    # (B, T) -> (B, T, V); the state continues the texts
    loss = model.loss(tokens, targets)               # without all logits
    text = model.generate(prompt, 200, temperature=0.7, top_k=40)

Shapes, in the whole package: B batch, T tokens, C coarse positions, S keys, N heads, H head dim, D model dim,
V vocabulary; ``x_BTD`` is a tensor of shape (B, T, D).
"""

from fairseq_ms.core.bottomup import BottomUp, BottomUpConfig
from fairseq_ms.core.coarse import CoarseLM, CoarseLMConfig
from fairseq_ms.core.compressive_transformer import CompressiveTransformer, CompressiveTransformerConfig
from fairseq_ms.core.groups import matrices_and_others
from fairseq_ms.core.haed import HAED, HRED, HAEDConfig, HREDConfig
from fairseq_ms.core.memory import Memory
from fairseq_ms.core.model import Bands, CausalModel, LanguageModel, ModelConfig
from fairseq_ms.core.retina import Retina, RetinaConfig
from fairseq_ms.core.scales import Scale
from fairseq_ms.core.topdown import TopDown, TopDownConfig
from fairseq_ms.core.transformer_ql import TransformerQL, TransformerQLConfig
from fairseq_ms.core.transformer_xl import TransformerXL, TransformerXLConfig
from fairseq_ms.core.vanilla import Vanilla, VanillaConfig

__all__ = [
    "HAED",
    "HRED",
    "Bands",
    "BottomUp",
    "BottomUpConfig",
    "CausalModel",
    "CoarseLM",
    "CoarseLMConfig",
    "CompressiveTransformer",
    "CompressiveTransformerConfig",
    "HAEDConfig",
    "HREDConfig",
    "LanguageModel",
    "Memory",
    "ModelConfig",
    "Retina",
    "RetinaConfig",
    "Scale",
    "TopDown",
    "TopDownConfig",
    "TransformerQL",
    "TransformerQLConfig",
    "TransformerXL",
    "TransformerXLConfig",
    "Vanilla",
    "VanillaConfig",
    "matrices_and_others",
]
