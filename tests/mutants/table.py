"""Which files have mutants, and the tests that have to notice them: the file's own first, then those of its models."""

from __future__ import annotations

# Mutants of a file, and the seed of the sample whose score docs/testing.md states.
SAMPLE, SEED = 12, 1

Stages = tuple[tuple[str, ...], ...]
"""Arguments of pytest; a later stage runs if all tests of those before it have passed."""


def _invariants(*archs: str) -> tuple[str, ...]:
    return ("tests/models/test_invariants.py", "-k", " or ".join(archs))


_RETINA: Stages = (
    ("tests/ops/test_window_attention.py", "tests/modules/test_retina.py"),
    ("tests/ops/test_dropout_masks.py",),
    _invariants("retina_lm"),
)
_STREAMING: Stages = (
    ("tests/models/test_streaming.py",),
    ("tests/references/test_streaming.py", "tests/core/test_streaming.py"),
)
# Without the tests that run whole commands.
_STREAMING_TASK = (
    "tests/tasks/test_streaming_language_modeling.py",
    *("-k", "not (flag or break_mode or perplexity or prompt)"),
)
_FIRST_PHASE: Stages = (("tests/models/test_iem.py",), ("tests/references/test_hierarchical.py",))

TABLE: dict[str, Stages] = {
    # Masks and window layout.
    "fairseq_ms/core/ops/attention.py": (
        ("tests/ops/test_attention.py",),
        ("tests/ops/test_dropout_masks.py", "tests/models/test_multiscale.py"),
    ),
    "fairseq_ms/core/ops/window_attention.py": _RETINA,
    "fairseq_ms/core/retina.py": _RETINA,
    # Pooling and blocks.
    "fairseq_ms/core/pooling.py": (("tests/modules/test_pooling.py",), ("tests/models/test_multiscale.py",)),
    "fairseq_ms/core/bottomup.py": (
        ("tests/models/test_multiscale.py", "-k", "bottomup or length or bottom_up or shorter"),
        _invariants("multiscale_bottomup"),
    ),
    "fairseq_ms/core/topdown.py": (
        ("tests/models/test_multiscale.py", "-k", "topdown or joining or shorter"),
        _invariants("multiscale_topdown"),
    ),
    # Caches that grow, and those that slide.
    "fairseq_ms/core/cache.py": (
        ("tests/modules/test_kv_cache.py",),
        ("tests/modules/test_retina.py", "-k", "pieces or cache"),
        _invariants("vanilla_lm", "retina_lm", "multiscale_topdown", "multiscale_bottomup", "coarse_lm"),
    ),
    # Relative shift and memory shifts.
    "fairseq_ms/core/ops/relative_attention.py": (
        ("tests/ops/test_relative_attention.py",),
        *_STREAMING,
        ("tests/ops/test_dropout_masks.py", "tests/models/test_half_precision.py"),
    ),
    "fairseq_ms/core/streaming.py": _STREAMING,
    "fairseq_ms/core/memory.py": (
        ("tests/models/test_streaming.py", "-k", "memory or forgotten"),
        *_STREAMING,
    ),
    "fairseq_ms/core/transformer_ql.py": (
        ("tests/modules/test_scale_lengths.py",),
        *_STREAMING,
        _invariants("transformer_ql"),
    ),
    "fairseq_ms/core/compressive_transformer.py": (
        ("tests/models/test_streaming.py", "-k", "reconstruction or compression"),
        *_STREAMING,
    ),
    # Streams.
    "fairseq_ms/data/streams.py": (
        ("tests/data/test_streams.py",),
        _STREAMING_TASK,
    ),
    "fairseq_ms/data/stream_memory.py": (
        ("tests/tasks/test_streaming_language_modeling.py", "-k", "transformer_xl and (carries or rebuilt)"),
        _STREAMING_TASK,
        ("tests/host/test_resuming.py", "-k", "later_end and transformer_xl"),
    ),
    # Segmentation and sampled softmax.
    "fairseq_ms/core/hierarchical/chunks.py": (("tests/models/test_haed.py",), _invariants("haed", "hred")),
    "fairseq_ms/core/iem.py": _FIRST_PHASE,
    "fairseq_ms/criterions/in_batch_sampled_softmax.py": (
        ("tests/criterions/test_in_batch_softmax.py",),
        *_FIRST_PHASE,
    ),
    "fairseq_ms/data/chunk_sampling.py": _FIRST_PHASE,
    # Context windows.
    "fairseq_ms/host/context_window.py": (
        ("tests/host/test_context_window.py", "-k", "not stride"),
        ("tests/lm/test_bos.py", "-k", "evaluation_behind_bos"),
        ("tests/host/test_context_window.py", "-k", "stride"),
    ),
}
