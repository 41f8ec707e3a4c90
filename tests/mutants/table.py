"""Which files have mutants, and the tests that have to notice them: the file's own first, then those of its models."""

from __future__ import annotations

# Mutants of a file, and the seed of the sample whose score docs/papers/testing.md states.
SAMPLE, SEED = 3, 1

_INVARIANTS = "tests/models/test_invariants.py -k"
# Steps of fixed shapes, for graphs of CUDA.
_GRAPHS = "tests/core/test_graphs.py"
_RETINA = (
    "tests/core/ops/test_window_attention.py tests/core/test_retina.py",
    "tests/core/ops/test_dropout_masks.py",
    f"{_INVARIANTS} retina_lm",
    _GRAPHS,
)
_STREAMING = ("tests/models/test_streaming.py", "tests/core/test_streaming.py", _GRAPHS)
_FIRST_PHASE = ("tests/models/test_iem.py",)

# Arguments of pytest for each file; later ones run if all tests of those before have passed.
TABLE: dict[str, tuple[str, ...]] = {
    "fairseq_ms/core/ops/attention.py": (
        "tests/core/ops/test_attention.py",
        "tests/core/ops/test_dropout_masks.py tests/models/test_multiscale.py",
    ),
    "fairseq_ms/core/ops/window_attention.py": _RETINA,
    "fairseq_ms/core/ops/window_blocks.py": _RETINA,
    "fairseq_ms/core/ops/flash_windows.py": (
        "tests/core/ops/test_window_attention.py",
        "tests/core/test_compiled.py -k Retina",
    ),
    "fairseq_ms/core/retina.py": _RETINA,
    "fairseq_ms/core/pooling.py": ("tests/core/test_pooling.py", "tests/models/test_multiscale.py"),
    "fairseq_ms/core/bottomup.py": (
        "tests/models/test_multiscale.py",
        f"{_INVARIANTS} multiscale_bottomup",
        f"tests/core/test_optimizers.py tests/core/test_layers.py tests/models/test_distributed.py {_GRAPHS}",
    ),
    "fairseq_ms/core/topdown.py": (
        "tests/models/test_multiscale.py",
        f"{_INVARIANTS} multiscale_topdown",
        f"tests/models/test_distributed.py {_GRAPHS}",
    ),
    "fairseq_ms/core/cache.py": (
        "tests/core/test_cache.py",
        "tests/core/test_retina.py -k 'pieces or cache'",
        f"{_INVARIANTS} 'vanilla_lm or retina_lm or multiscale or coarse_lm'",
        _GRAPHS,
    ),
    "fairseq_ms/core/ops/relative_attention.py": (
        "tests/core/ops/test_relative_attention.py",
        *_STREAMING,
        "tests/core/ops/test_dropout_masks.py tests/models/test_half_precision.py",
    ),
    "fairseq_ms/core/streaming.py": _STREAMING,
    "fairseq_ms/core/steps/states.py": (_GRAPHS,),
    "fairseq_ms/core/steps/streams.py": (_GRAPHS,),
    "fairseq_ms/core/stream_state.py": _STREAMING,
    "fairseq_ms/core/transformer_ql.py": (
        "tests/core/test_transformer_ql.py",
        *_STREAMING,
        f"{_INVARIANTS} transformer_ql",
    ),
    "fairseq_ms/core/compressive_transformer.py": _STREAMING,
    "fairseq_ms/data/streams.py": ("tests/data/test_streams.py", "tests/tasks/test_streaming_language_modeling.py"),
    "fairseq_ms/data/stream_memory.py": (
        "tests/tasks/test_streaming_language_modeling.py",
        "tests/host/test_resuming.py -k 'later_end and transformer_xl'",
    ),
    "fairseq_ms/core/hierarchical/chunks.py": ("tests/models/test_haed.py", f"{_INVARIANTS} 'haed or hred'"),
    "fairseq_ms/core/iem.py": _FIRST_PHASE,
    "fairseq_ms/criterions/in_batch_sampled_softmax.py": (
        "tests/criterions/test_in_batch_softmax.py",
        *_FIRST_PHASE,
        "tests/host/test_several_processes.py -k twice_the_batch",
    ),
    "fairseq_ms/data/chunk_sampling.py": _FIRST_PHASE,
    "fairseq_ms/host/context_window.py": (
        "tests/host/test_context_window.py",
        "tests/lm/test_bos.py -k evaluation_after_bos",
    ),
}
