"""haed and hred against their definition, read one token at a time."""

import itertools
import random
from typing import Any

import pytest
import torch

from fairseq_ms.core import HAEDConfig
from fairseq_ms.core.hierarchical.chunks import Segmentation, unique_chunks
from fairseq_ms.errors import UsageError
from fairseq_ms.models.haed import HAEDLanguageModel
from tests.configs import haed as configs
from tests.helpers.gradients import assert_same_with_gradients
from tests.references import hierarchical as references
from tests.references.parts import weights_of, within
from tests.registry import build, dictionary

PARTS = list(itertools.product(["mlp", "lstm"], ["transformer", "lstm"], ["lstm", "transformer"], ["words", "fixed"]))


def small_model(seed: int, **wanted: str) -> tuple[HAEDLanguageModel, dict, random.Random]:
    """A random model in float64 with the parts that are wanted, and its flags."""
    rng = random.Random(seed)
    while True:
        flags = configs.random_flags(rng)
        if all(flags[name] == value for name, value in wanted.items()):
            break
    torch.manual_seed(seed)
    model = build("haed", {**flags, "init_std": 0.5}, dictionary(7)).double()
    assert isinstance(model, HAEDLanguageModel)
    return model, flags, rng


def ragged_tokens(rng: random.Random, rows: int, longest: int) -> tuple[torch.Tensor, list[int]]:
    """Random rows of different lengths, padded on the right, the first without padding."""
    lengths = [longest] + [rng.randint(1, longest) for _ in range(rows - 1)]
    tokens = torch.randint(4, 11, (rows, longest))
    tokens[torch.rand(tokens.shape) < 0.2] = 2
    for row, length in enumerate(lengths):
        tokens[row, length:] = 1
    return tokens, lengths


@pytest.mark.parametrize("kind", ["words", "fixed"])
@pytest.mark.parametrize("longest", [1, 2, 3, 12])
def test_chunks_end_where_a_loop_over_the_past_says(kind: str, longest: int) -> None:
    separators = (4, 2) if kind == "words" else ()
    sizes: dict[str, Any] = {"vocab_size": 9, "padding_idx": 1, "max_segment_len": longest}
    segmentation = Segmentation(HAEDConfig(segmentation=kind, separators=separators, **sizes))
    rng = random.Random(longest)
    for _ in range(20):
        tokens, lengths = ragged_tokens(rng, 3, rng.randint(1, 40))
        tokens.clamp_(max=8)
        ends = segmentation.ends(tokens, tokens != 1)
        place = torch.full((3,), -1)
        for step in range(tokens.shape[1]):
            ended, place = segmentation.advance(place, tokens[:, step])
            inside = torch.tensor([step < length for length in lengths])
            assert torch.equal(ended & inside, ends[:, step])
        for row, length in enumerate(lengths):
            flags = {"max_segment_len": longest}
            chunks = references.whole_chunks_of(tokens[row, :length].tolist(), flags, separators)
            expected = torch.zeros(tokens.shape[1], dtype=torch.bool)
            expected[torch.tensor([len(chunk) for chunk in chunks]).cumsum(0) - 1] = True
            assert torch.equal(ends[row], expected)


@pytest.mark.parametrize("parts", PARTS, ids="-".join)
def test_logits_and_gradients_are_those_of_the_paper_with_rows_padded_on_the_right(parts: tuple[str, ...]) -> None:
    for seed in range(3):
        model, flags, rng = small_model(seed, **dict(zip(("encoder", "main", "decoder", "segmentation"), parts)))
        segmentation, longest = model.decoder.core.segmentation, rng.randint(2, 13)
        separators = set(segmentation.separators)
        rows = [torch.randint(4, 11, (length,)) for length in (longest, rng.randint(1, longest), 1)]
        for row in rows:
            row[torch.rand(len(row)) < 0.3] = min(separators, default=2)
        weights = within(weights_of(model), "decoder")
        expected = torch.cat([torch.stack(references.logits(weights, flags, separators, row.tolist())) for row in rows])
        tokens_BT = torch.full((len(rows), 2 * longest), 1)
        for tokens_T, row in zip(tokens_BT, rows):
            tokens_T[: len(row)] = row
        found = torch.cat([logits_TV[: len(row)] for logits_TV, row in zip(model(tokens_BT)[0], rows)])
        parameters = dict(model.named_parameters())
        reached = torch.autograd.grad(found.sum(), [*parameters.values()], allow_unused=True, retain_graph=True)
        for name, gradient in zip(parameters, reached):
            assert gradient is not None, f"{name} has no gradient, which distributed training does not allow"
        # float64 with a few hundred additions a number
        assert_same_with_gradients(found, expected, [*parameters.values()], 1e-9)


def test_equal_chunks_are_encoded_once() -> None:
    model, *_ = small_model(3, encoder="mlp", segmentation="words")
    encoder = model.decoder.core.encoder
    seen = []
    encoder.first.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[0]))
    longest = model.decoder.core.segmentation.max_length
    chunks = torch.full((6, longest), 1)
    chunks[:, 0] = torch.tensor([5, 6, 5, 5, 6, 7])
    together = encoder(chunks)
    assert seen == [3]
    for index in range(6):
        torch.testing.assert_close(together[index], encoder(chunks[index : index + 1])[0])
    assert unique_chunks(chunks)[2].tolist() == [3, 2, 1]


def test_every_parameter_is_in_the_group_of_its_part() -> None:
    model, *_ = small_model(0)
    for name, parameter in model.named_parameters():
        part = {"encoder": "encoder", "main": "main"}.get(name.split(".")[2], "decoder")
        assert parameter.param_group == part, name


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"decoder": "transformer", "decoder_units": 12}, "--local-attention-heads must divide --decoder-units 12"),
        ({"decoder_embed_dim": 100}, "--decoder-embed-dim must exceed --position-embed-dim 100"),
        ({"separators": "word0 nothing"}, "--separators must .*'nothing'"),
        ({"separators": " "}, "--separators must"),
        ({"max_target_positions": 32}, "--tokens-per-sample must .*--max-target-positions 32"),
        ({"positions": "rotary", "attention_head_dim": 3}, "rotary --positions need .*got 3"),
        ({"positions": "none", "position_embed_dim": 9}, "--positions must be learned with --position-embed-dim 9"),
        ({"positions": "rotary", "main": "lstm"}, "--positions must be learned with --main lstm"),
        ({"main": "lstm", "qk_norm": True}, "--qk-norm has no effect without a transformer"),
    ],
)
def test_flags_that_make_no_sense_are_refused_in_one_sentence(flags: dict, named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named}[^\\n]*$"):
        build("haed", {"criterion": "cross_entropy", **flags}, dictionary(5))
    if " has no effect without" in named:
        # A checkpoint that is only evaluated may have been trained with it.
        build("haed", {"criterion": "cross_entropy", **flags}, dictionary(5), from_checkpoint=True)


def test_the_papers_model_has_the_papers_sizes() -> None:
    model = build("haed", {"criterion": "cross_entropy", "decoder_units": 1024}, dictionary(200))
    decoder = model.decoder.core
    assert [tuple(layer.weight.shape) for layer in (decoder.encoder.first, decoder.encoder.second)] == [
        (256, 120),
        (256, 256),
    ]
    assert decoder.main.positions.weight.shape[1] == 100
    attention = decoder.main.stack.layers[0].attention
    assert (len(decoder.main.stack.layers), attention.heads, attention.qkv.weight.shape) == (6, 8, (768, 356))
    assert decoder.main.stack.layers[0].ffn.up.weight.shape == (1424, 356)
    assert decoder.chunk_decoder.lstm.cell.weight_ih_l0.shape == (4 * 1024, 10 + 356)
