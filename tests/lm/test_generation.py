"""fairseq's own generator, with our caches and without them, gives the same."""

from typing import Any

import pytest
import torch
from fairseq.models import FairseqDecoder, FairseqLanguageModel
from fairseq.search import BeamSearch, Sampling, Search
from fairseq.sequence_generator import SequenceGenerator

from fairseq_ms.core.steps import has_steps
from fairseq_ms.lm.base import BaseLanguageModel
from fairseq_ms.lm.incremental import Decoding
from tests.helpers.seeds import seeds
from tests.registry import GENERATORS, Case, exact_case, random_case, setting

MAX_NEW_TOKENS = 12


class _NaiveDecoder(FairseqDecoder):
    """The same model without any state: fairseq then runs over the whole prefix at every step."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.decoder.dictionary)
        self.model = model

    def forward(self, tokens, encoder_out=None):
        return self.model(tokens)[0], None

    def max_positions(self) -> int:
        return self.model.max_positions()

    def get_normalized_probs(self, output, log_probs, sample=None):
        return self.model.get_normalized_probs(output, log_probs, sample)


def naive_twin(model: BaseLanguageModel) -> FairseqLanguageModel:
    return FairseqLanguageModel(_NaiveDecoder(model))


def ragged_prompts(case: Case, rows: int) -> torch.Tensor:
    """Prompts of several lengths, padded on the right, each beginning with the end-of-sentence symbol."""
    words = case.dictionary
    lengths = [case.rng.randint(1, 7) for _ in range(rows)]
    prompts = torch.full((rows, 1 + max(lengths)), words.pad())
    prompts[:, 0] = words.eos()
    for row, length in enumerate(lengths):
        prompts[row, 1 : 1 + length] = case.tokens(1, length)[0]
    return prompts


def generate(
    model: torch.nn.Module, case: Case, prompts: torch.Tensor, beam: int, search: type[Search] = BeamSearch
) -> list:
    generator = SequenceGenerator(
        [model],
        case.dictionary,
        beam_size=beam,
        max_len_a=0,
        max_len_b=prompts.size(1) + MAX_NEW_TOKENS,
        search_strategy=search(case.dictionary),
    )
    sample = {"net_input": {"src_tokens": prompts}, "id": torch.arange(prompts.size(0))}
    return generator.generate([model], sample, prefix_tokens=prompts[:, 1:], bos_token=case.dictionary.eos())


@pytest.mark.parametrize("seed", seeds(2, 12))
@pytest.mark.parametrize("arch", GENERATORS)
def test_beam_search_over_ragged_prompts_finds_what_it_finds_without_caches(arch: str, seed: int) -> None:
    case = exact_case(arch, seed)
    prompts = ragged_prompts(case, rows=3)
    beam = setting(arch, "BEAM", case.rng.choice([1, 2, 4]))
    cached = generate(case.model, case, prompts, beam)
    naive = generate(naive_twin(case.model), case, prompts, beam)
    for cached_row, naive_row in zip(cached, naive):
        assert len(cached_row) == len(naive_row)
        for one, other in zip(cached_row, naive_row):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            # fairseq adds up scores in float32, and these are differences of its sums.
            torch.testing.assert_close(one["positional_scores"], other["positional_scores"], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("arch", GENERATORS)
def test_beam_search_in_steps_of_fixed_shapes_finds_what_it_finds_without_caches(
    arch: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.get_default_device().type == "cpu":
        # The steps are those that a GPU captures; here they run one by one.
        monkeypatch.setattr("fairseq_ms.core.steps.replay.takes_graphs", lambda model, _: has_steps(model))
    case = exact_case(arch, seed)
    # The second batch takes over the buffers of the first.
    for _ in range(2):
        prompts = ragged_prompts(case, rows=3)
        found, expected = (generate(model, case, prompts, 2) for model in (case.model, naive_twin(case.model)))
        for rows in zip(found, expected, strict=True):
            one, other = ([hypothesis["tokens"].tolist() for hypothesis in row] for row in rows)
            assert one == other
    assert (case.model.decoder.core.steps is not None) == has_steps(case.model.decoder.core)


@pytest.mark.parametrize("seed", seeds(1, 6))
@pytest.mark.parametrize("arch", GENERATORS)
def test_sampling_after_ragged_prompts_draws_what_it_draws_without_caches(arch: str, seed: int) -> None:
    case = exact_case(arch, seed)
    prompts = ragged_prompts(case, rows=3)
    drawn = []
    for model in (case.model, naive_twin(case.model)):
        torch.manual_seed(seed)
        rows = generate(model, case, prompts, beam=2, search=Sampling)
        drawn.append([hypothesis["tokens"].tolist() for row in rows for hypothesis in row])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("arch", GENERATORS)
def test_the_shared_part_of_the_prompts_is_run_over_once_and_not_once_a_sample(arch: str, monkeypatch) -> None:
    case = random_case(arch, 0)
    prompts = torch.cat([torch.full((2, 1), case.dictionary.eos()), case.tokens(2, 6)], dim=1)
    shapes = []
    features = case.model.decoder.core.features

    def spy(tokens, state):
        shapes.append(tuple(tokens.shape))
        return features(tokens, state)

    monkeypatch.setattr(case.model.decoder.core, "features", spy)
    generate(case.model, case, prompts, beam=3, search=Sampling)
    assert shapes[0] == (2, 7)
    assert {length for _, length in shapes[1:]} == {1}


def test_a_wrong_hint_about_the_prompts_costs_time_and_changes_nothing() -> None:
    case = random_case("retina_lm", 3)
    tokens = case.tokens(2, 9)
    wrong = {"prompts": torch.cat([tokens[:, :4], case.tokens(2, 5).flip(0)], dim=1), "rows": torch.arange(2)}
    wrong["prompts"][:, 4] = (tokens[:, 4] - 3) % 9 + 4
    decoding = Decoding(case.model.decoder.core, case.model.decoder.core.new_state)
    with torch.no_grad():
        for end in range(1, 10):
            features = decoding.last_features(tokens[:, :end], wrong)
            full = case.model(tokens[:, :end])[0][:, -1:]
            torch.testing.assert_close(case.model.decoder.output_layer(features), full, rtol=0.0, atol=1e-5)
