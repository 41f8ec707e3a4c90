"""``--compile-layers``: what layers give under torch.compile, how many graphs that takes, and where it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_ms.errors import UsageError
from fairseq_ms.lm.base import LanguageModel
from tests.helpers.cli import USER_DIR, run_cli
from tests.helpers.corpus import write_corpus
from tests.registry import build, dictionary

SIZES = {
    **{"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_attention_heads": 4, "init_std": 0.4},
    **{"recompute": "none", "dropout": 0.0, "attention_dropout": 0.0},
}
# A stack of layers, a stack for each scale, layers with a memory: the other architectures are made of the same.
OWN: dict[str, dict[str, Any]] = {
    "vanilla_lm": {"decoder_layers": 2},
    "multiscale_topdown": {"scale_layers": "4x=1,1x=2"},
    "transformer_ql": {"decoder_normalize_before": True},
}
# Ragged on purpose: multiples of no scale, shorter than a block, a single token.
LENGTHS = (64, 33, 32, 17, 48, 8, 4, 1)
# Fewer than lengths, and than the 8 after which torch.compile gives up on a layer.
MOST_GRAPHS = 5


def seeded(arch: str, **flags: Any) -> LanguageModel:
    torch.manual_seed(1)
    # In float64, so that a sum in another order is told from a fault.
    return build(arch, {**SIZES, **OWN[arch], **flags}, dictionary(9)).double().train()


def logits_and_gradients(model: LanguageModel, tokens: Tensor) -> list[Tensor]:
    logits = model(tokens)[0]
    parameters = list(model.parameters())
    grads = torch.autograd.grad(logits.logsumexp(-1).sum(), parameters, allow_unused=True)
    # What no token depends on has no gradient, or zeros when it is compiled.
    return [logits, *(torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads))]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "flags"), [*((arch, {}) for arch in OWN), ("vanilla_lm", {"positions": "rotary"})])
def test_compiled_layers_give_what_layers_give_with_few_graphs(arch: str, flags: dict[str, Any]) -> None:
    torch._dynamo.reset()
    eager, compiled = seeded(arch, **flags), seeded(arch, **flags, compile_layers=True)
    assert list(eager.state_dict()) == list(compiled.state_dict())
    torch._dynamo.utils.counters.clear()
    for length in LENGTHS:
        tokens = torch.randint(4, 13, (2, length))
        for one, other in zip(logits_and_gradients(eager, tokens), logits_and_gradients(compiled, tokens), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    counters = torch._dynamo.utils.counters
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS
    assert not counters["graph_break"]


@pytest.mark.slow
def test_compiled_layers_drop_and_can_be_checkpointed() -> None:
    torch._dynamo.reset()
    model = seeded("vanilla_lm", compile_layers=True, dropout=0.3, attention_dropout=0.3, checkpoint_activations=True)
    tokens = torch.randint(4, 13, (2, 20))
    assert (model(tokens)[0] != model(tokens)[0]).any()
    assert all(grad.isfinite().all() for grad in logits_and_gradients(model, tokens))
    # In evaluation they drop nothing, and equal layers that are not compiled.
    torch.testing.assert_close(model.eval()(tokens)[0], seeded("vanilla_lm").eval()(tokens)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("arch", "flags", "sentence"),
    [
        ("vanilla_lm", {"recompute": "pointwise"}, "--compile-layers needs --recompute none"),
        ("vanilla_lm", {"scale_windows": "1x=0:4"}, "--compile-layers cannot be used with --scale-windows"),
        ("retina_lm", {"scale_windows": "1x=0:4,2x=4:8"}, "--compile-layers cannot be used with --scale-windows"),
    ],
)
def test_where_it_cannot_work_it_is_refused(arch: str, flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build(arch, {**SIZES, "compile_layers": True, **flags}, dictionary(9))


def test_what_loads_a_checkpoint_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr("fairseq_ms.lm.base.compile_layers", compiled.append)
    flags = {**SIZES, **OWN["vanilla_lm"], "compile_layers": True}
    build("vanilla_lm", flags, dictionary(9), from_checkpoint=True)
    assert not compiled
    build("vanilla_lm", flags, dictionary(9))
    assert len(compiled) == 1


def test_without_a_compiler_training_ends_before_it_begins(tmp_path: Path) -> None:
    environment = {"CXX": str(tmp_path / "nowhere"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command: list[str | Path] = [
        "fairseq-train",
        write_corpus(tmp_path),
        "--user-dir",
        USER_DIR,
        "--arch",
        "vanilla_lm",
    ]
    command += ["--task", "language_modeling", "--tokens-per-sample", "16", "--batch-size", "2", "--cpu"]
    command += ["--recompute", "none", "--compile-layers", "--save-dir", tmp_path / "save"]
    done = run_cli(*command, check=False, env=environment)
    assert done.returncode == 1
    assert "fairseq-train: error: --compile-layers needs a compiler that torch.compile can use for cpu" in done.stderr
    assert "Traceback" not in done.stderr
