"""The flags that models with a memory share, and fairseq's decoder over such a model of the core."""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.models import MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingTask

from fairseq_ms.lm.base import BaseLanguageModel
from fairseq_ms.lm.choices import Activation, option
from fairseq_ms.lm.config import LanguageModelFlags, model_settings, of_core, require


@dataclass
class StreamingFlags(LanguageModelFlags):
    """Flags of every streaming model."""

    activation_fn: Activation = option("relu", "activation function of the feed-forward blocks")
    decoder_normalize_before: bool = option(False, "apply layernorm before each decoder block")
    attention_head_dim: Optional[int] = option(
        None, "width of an attention head (default: --decoder-embed-dim / heads)", least=1
    )
    mem_len: int = option(16, "number of states before the segment that every layer remembers", least=0)
    proj_init_std: float = option(
        0.01,
        "standard deviation of the normal distribution projections of adaptive input and softmax start from",
        least=0,
        needs=["adaptive_input", "adaptive_softmax_cutoff"],
    )


def streaming_settings(cfg: StreamingFlags, source_dictionary: Any, target_dictionary: Any) -> dict[str, Any]:
    """The fields of ``core.streaming.StreamingConfig`` by name, from the flags that all streaming models share."""
    return {
        **model_settings(cfg, source_dictionary, target_dictionary),
        **of_core(cfg, "head_dim", "segment_len", "mem_len", "proj_init_std"),
        "normalize_before": cfg.decoder_normalize_before,
    }


def with_a_memory() -> list[str]:
    """The architectures that the streaming task is for."""
    return sorted(name for name, model in MODEL_REGISTRY.items() if issubclass(model, StreamingLanguageModel))


class StreamingLanguageModel(BaseLanguageModel):
    """A language model with a memory; ``extra["memory"]`` of a call continues the stream in the next."""

    def memory_flags(self) -> dict[str, int | str]:
        """The flags that the lengths of a memory come from, beside the segment's, and their values."""
        return {"--mem-len": self.decoder.core.mem_len}

    @classmethod
    def build_model(cls, cfg: StreamingFlags, task: object) -> BaseLanguageModel:
        """As the base's; the task's ``--tokens-per-sample`` is the segment length, or else the trained one.

        Raises UsageError under a task that would begin every block without a memory.
        """
        name = next((name for name, known in TASK_REGISTRY.items() if known is type(task)), None)
        require(
            not isinstance(task, LanguageModelingTask) or hasattr(task, "carried"),
            "--task must be streaming_language_modeling for a model with a memory "
            f"({', '.join(with_a_memory())}): got {name}",
        )
        given = getattr(getattr(task, "args", None) or getattr(task, "cfg", None), "tokens_per_sample", None)
        if given is not None:
            cfg.tokens_per_sample = given
        require(
            cfg.tokens_per_sample is not None and cfg.tokens_per_sample >= 1,
            f"--tokens-per-sample must be at least 1, the length of a segment: got {cfg.tokens_per_sample}",
        )
        # There are no position embeddings that it could exceed.
        cfg.max_target_positions = cfg.tokens_per_sample
        return super().build_model(cfg, task)
