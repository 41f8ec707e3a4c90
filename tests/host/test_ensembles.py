"""Generation from several models at once: the mean of their probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fairseq.models import FairseqLanguageModel
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator

from tests.lm.test_generation import _NaiveDecoder, ragged_prompts
from tests.registry import GENERATORS, Case, build, random_case


class _MeanOfModels(torch.nn.Module):
    """The mean of several models' probabilities, each of which runs over the whole prefix."""

    def __init__(self, models: Sequence[Any]) -> None:
        super().__init__()
        self.models = list(models)
        self.decoder = models[0].decoder

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        found = [model.get_normalized_probs(model(tokens), log_probs=False, sample=None) for model in self.models]
        return torch.stack(found).mean(0).log(), None

    def max_positions(self) -> int:
        return 64

    def get_normalized_probs(self, output, log_probs, sample=None):
        return output[0]


def generate(models: list[Any], case: Case, prompts: torch.Tensor, beam: int) -> list[list[dict[str, Any]]]:
    generator = SequenceGenerator(
        models,
        case.dictionary,
        beam_size=beam,
        max_len_b=prompts.size(1) + 8,
        temperature=1.0,
        search_strategy=BeamSearch(case.dictionary),
    )
    sample = {"net_input": {"src_tokens": prompts}, "id": torch.arange(prompts.size(0))}
    return generator.generate(models, sample, prefix_tokens=prompts[:, 1:], bos_token=case.dictionary.eos())


def assert_mean_of(models: list[Any], case: Case, beam: int) -> None:
    prompts = ragged_prompts(case, rows=3)
    found = generate(models, case, prompts, beam)
    expected = generate([FairseqLanguageModel(_NaiveDecoder(_MeanOfModels(models)))], case, prompts, beam)
    for found_row, expected_row in zip(found, expected, strict=True):
        for one, other in zip(found_row, expected_row, strict=True):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            torch.testing.assert_close(one["positional_scores"], other["positional_scores"], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("arch", GENERATORS)
def test_an_ensemble_of_two_of_ours_averages_probabilities(arch: str) -> None:
    case = random_case(arch, 2)
    torch.manual_seed(9)
    assert_mean_of([case.model, build(arch, {"init_std": 0.4, **case.flags}, case.dictionary).eval()], case, beam=2)
    vanilla = build("vanilla_lm", {"decoder_embed_dim": 8, "decoder_attention_heads": 2}, case.dictionary).eval()
    assert_mean_of([vanilla, case.model], case, beam=2)
