"""Language models in plain PyTorch: multi-scale Transformers, models with a memory, and hierarchical ones.

Each model has a configuration of its sizes, ``Vanilla`` and ``VanillaConfig`` for instance:

    model = Retina(RetinaConfig(vocab_size=8000, layers=6))
    logits, state = model(tokens)                    # (B, T) -> (B, T, V); the state continues the texts
    loss = model.loss(tokens, targets)               # without all logits
    text = model.generate(prompt, 200, temperature=0.7, top_k=40)

The name of a tensor ends in its shape: ``x_BTD`` is (B, T, D). In all of ``core``,

    B texts of a batch    T tokens            D width of the model      V symbols of the vocabulary
    N heads               H width of a head   S keys                    C coarse positions: blocks, or chunks of a text
    M positions before    P distances         F frequencies, half of H  O, I outputs and inputs of a projection
    W chunks of a batch   Y different chunks  A candidates among them   L tokens of a chunk, at most
    E width of encodings  U hidden units      G gates, 4 U              J queries that share a slice of keys
    Q tokens in one list  K targets of each   R some rows, of several   Z rows of a result, padding among them

In attention, K are heads of keys and values, and G the query heads, or queries of a row, that share one. In a short
convolution, N are the positions before. X is any number or shape; (2, T, F) has two rows, cosines and sines.
"""

from fairseq_ms.core import steps  # noqa: F401 (the models' loop over tokens)
from fairseq_ms.core.adaptive import Bands
from fairseq_ms.core.bottomup import BottomUp, BottomUpConfig
from fairseq_ms.core.coarse import CoarseLM, CoarseLMConfig
from fairseq_ms.core.compressive_transformer import CompressiveTransformer, CompressiveTransformerConfig
from fairseq_ms.core.config import ModelConfig
from fairseq_ms.core.hierarchical.haed import HAED, HRED, HAEDConfig, HREDConfig
from fairseq_ms.core.model import CausalModel, LanguageModel, Loss
from fairseq_ms.core.ops.window_attention import window_attention
from fairseq_ms.core.optimizers import MuonAndAdamW, matrices_and_others, muon_and_adamw
from fairseq_ms.core.retina import Retina, RetinaConfig
from fairseq_ms.core.scales import Scale
from fairseq_ms.core.stream_state import Memory
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
    "Loss",
    "Memory",
    "ModelConfig",
    "MuonAndAdamW",
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
    "muon_and_adamw",
    "window_attention",
]
