"""``haed``, ``hred`` and their first phase agree with their references."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_ms.criterions import in_batch_sampled_softmax
from tests.references import hierarchical
from tests.references.parts import log_softmax, weights_of, within
from tests.registry import build, dictionary, random_case

# Both sides compute in double precision and differ in the order of additions only.
TOLERANCE = 1e-9

LENGTHS = [1, 2, 4, 13]


def separators_of(flags: dict[str, Any], words: Any) -> set[int]:
    """The symbols that end a word; by default the end of the line, in a dictionary without a symbol for spaces."""
    if flags["segmentation"] == "fixed":
        return set()
    return {words.index(symbol) for symbol in (flags["separators"] or "</s>").split()}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("arch", ["haed", "hred"])
def test_likelihood_of_a_ragged_batch_is_that_of_the_paper(arch: str, seed: int) -> None:
    """Every logit, and the sum of the log-probabilities of what follows, whatever padding there is."""
    case = random_case(arch, seed)
    model = case.model.double()
    separators = separators_of(case.flags, case.dictionary)
    rows = [torch.randint(2, len(case.dictionary), (length,)) for length in LENGTHS]
    for row in rows:
        row[torch.rand(len(row)) < 0.3] = min(separators, default=2)
        row[row == case.dictionary.unk()] = 4
    # Padding behind a row, and padding strewn over it: behind its first token, which is always one.
    pad, longest = case.dictionary.pad(), 2 * max(LENGTHS)
    behind = [torch.arange(len(row)) for row in rows]
    strewn = [
        torch.cat([torch.zeros(1), 1 + torch.randperm(longest - 1)[: len(row) - 1].sort().values]) for row in rows
    ]
    weights = within(weights_of(model), "decoder")
    for places in (behind, [place.long() for place in strewn]):
        tokens_BT = torch.full((len(rows), longest), pad)
        for row_T, place, row in zip(tokens_BT, places, rows):
            row_T[place] = row
        with torch.no_grad():
            logits_BTV = model(tokens_BT)[0]
        for found_TV, place, row in zip(logits_BTV, places, rows):
            with torch.no_grad():
                vectors = hierarchical.logits(weights, case.flags, separators, row.tolist())
            expected_TV = torch.stack(vectors)
            torch.testing.assert_close(found_TV[place], expected_TV, rtol=0, atol=TOLERANCE)
            targets = row.tolist()[1:]
            likelihood = sum(log_softmax(vector)[target].item() for vector, target in zip(vectors, targets))
            log_probs_TV = found_TV[place[: len(targets)]].log_softmax(-1)
            ours = log_probs_TV.gather(1, row[1:, None]).sum().item()
            assert ours == pytest.approx(likelihood, rel=0, abs=TOLERANCE * longest)


@pytest.mark.parametrize("query", ["none", "linear"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_of_the_first_phase_is_equation_4(seed: int, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The criterion's loss, with the chunks of its further batches among the candidates, equals the literal sum."""
    case = random_case("haed", seed)
    flags = {**case.flags, "segmentation": "words", "separators": None, "max_segment_len": 2, "query": query}
    flags |= {"decoder": "lstm", "local_layers": None, "local_attention_heads": None, "local_ffn_embed_dim": None}
    words = dictionary(3)
    torch.manual_seed(seed)
    model = build("haed", {"init_std": 0.5, **flags, "criterion": "in_batch_sampled_softmax"}, words)
    model = model.double().eval()
    # Few symbols, so that chunks repeat; 2 ends a word.
    rows = [[4, 5, 5, 2, 6, 2, 5], [2, 4], [6, 6, 6, 6, 6, 5, 2, 4, 4]]
    further = [[5, 4, 2, 6, 6, 5], [6, 2, 2, 5, 5, 6]]
    monkeypatch.setattr(in_batch_sampled_softmax, "random_blocks", lambda *_: torch.tensor(further))
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, datasets={"train": None})
    criterion = in_batch_sampled_softmax.InBatchSampledSoftmax(task, 2, "none", 1000, False, 1).eval()

    def padded(cut: list[list[int]]) -> torch.Tensor:
        return torch.tensor([row + [words.pad()] * (8 - len(row)) for row in cut])

    source, target = padded([row[:-1] for row in rows]), padded([row[1:] for row in rows])
    sample = {"id": torch.arange(3), "net_input": {"src_tokens": source}, "target": target, "ntokens": 15}
    with torch.no_grad():
        loss, predicted, _ = criterion(model, sample)
    expected, chunks = hierarchical.first_phase_loss(weights_of(model), flags, {words.eos()}, rows, further)
    assert predicted == chunks
    assert loss.item() == pytest.approx(expected, rel=1e-9)
