"""The streaming models agree with their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.references import streaming
from tests.references.parts import weights_of
from tests.registry import Case, build, random_case

# Both sides compute in double precision and differ in the order of additions only.
TOLERANCE = 1e-9

WITHOUT_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}


@torch.no_grad()
def reference(case: Case, weights: streaming.Weights, tokens: list[int]) -> torch.Tensor:
    """Logits (T, V) of the reference."""
    if case.arch == "compressive_transformer":
        return torch.stack(streaming.compressive_transformer(weights, case.flags, tokens)[0])
    return torch.stack(getattr(streaming, case.arch)(weights, case.flags, tokens))


def in_training(case: Case, **changes: Any) -> Any:
    """The case's model in training mode, in double precision and without dropout."""
    torch.manual_seed(1)
    model = build(case.arch, {"init_std": 0.4, **case.flags, **WITHOUT_DROPOUT, **changes}, case.dictionary)
    return model.double().train()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("arch", ["transformer_xl", "compressive_transformer", "transformer_ql"])
def test_logits_of_several_segments_are_those_of_the_paper(arch: str, seed: int) -> None:
    """Two calls cut anywhere, the second with the memory of the first; the second row ends in padding."""
    case = random_case(arch, seed)
    model = case.model.double()
    # Enough segments for a short memory to fill and for states to leave it again.
    length = max(3 * case.flags["tokens_per_sample"], 16) + case.rng.randint(1, 5)
    tokens_BT = case.tokens(2, length)
    cut, end = case.rng.randint(1, length - 2), length - 1
    tokens_BT[1, end:] = case.dictionary.pad()
    with torch.no_grad():
        first, extra = model(tokens_BT[:, :cut])
        second, _ = model(tokens_BT[:, cut:], memory=extra["memory"])
    logits_BTV = torch.cat([first, second], dim=1)
    for logits_TV, row in zip(logits_BTV, [tokens_BT[0], tokens_BT[1, :end]]):
        expected_TV = reference(case, weights_of(model), row.tolist())
        torch.testing.assert_close(logits_TV[: len(row)], expected_TV, rtol=0, atol=TOLERANCE)


def test_droppath_keeps_the_scales_of_the_paper() -> None:
    """Section 2.3: with probability p / (l - 1) each, only scales j .. l are kept, for j = 2 .. l; else all."""
    case = random_case("transformer_ql", 0)
    flags = {"scale_layers": "1x=1,2x=1,4x=1", "tokens_per_sample": 4, "mem_len": 3, "compression": "avg"}
    flags |= {"droppath": 0.6, "decoder_normalize_before": True}
    model = in_training(case, **flags)
    tokens_BT = case.tokens(1, 4)
    weights = weights_of(model)
    kept = [
        torch.stack(streaming.transformer_ql(weights, {**case.flags, **flags}, tokens_BT[0].tolist(), finest))
        for finest in (1, 2, 3)
    ]
    seen = []
    draws = 400
    for _ in range(draws):
        with torch.no_grad():
            logits_TV = model(tokens_BT)[0][0]
        (finest,) = (j for j, expected in enumerate(kept, 1) if (logits_TV - expected).abs().max() < TOLERANCE)
        seen.append(finest)
    # Shares 0.4, 0.3 and 0.3, each with a standard deviation of 0.025 at most: four of them.
    for finest, share in ((1, 0.4), (2, 0.3), (3, 0.3)):
        assert abs(seen.count(finest) / draws - share) < 0.1
