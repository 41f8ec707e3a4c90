"""neighbors, against comparing with every segment."""

import json
import math

import numpy as np
import pytest
import torch

from fairseq_ms.cli import main
from fairseq_ms.papers import neighbors
from tests.helpers.trained import load, random_lines


@pytest.mark.parametrize(
    ("name", "scales"),
    [("vanilla", [1]), ("retina", [1, 4]), ("topdown", [1, 4, 16]), ("bottomup", [1, 4, 16]), ("coarse", [4])],
)
def test_identical_segments_are_nearest_neighbours_at_every_scale(models, name, scales):
    checkpoint = load(models, name)
    segments = neighbors.cut_segments(checkpoint.text("train"), 18)
    vectors = neighbors.embed(checkpoint, segments, max_tokens=100)
    assert list(vectors) == scales
    for scale in scales:
        assert len(vectors[scale]) == 40
        (row, cosine), *_ = neighbors.nearest(vectors[scale], vectors[scale][5], 3, exclude=5)
        assert row == 31
        assert cosine == pytest.approx(1.0, abs=1e-5)


def test_representations_see_only_their_own_segment_and_are_means_over_it(models):
    checkpoint = load(models, "topdown")
    segments = neighbors.cut_segments(checkpoint.text("train"), 18)
    alone = checkpoint.model.decoder.core.representations(segments[7:8])
    together = neighbors.embed(checkpoint, segments, [4, 16], max_tokens=200)
    for scale in (4, 16):
        assert alone[scale].shape == (1, math.ceil(18 / scale), 16)
        torch.testing.assert_close(together[scale][7], alone[scale][0].mean(0), atol=1e-5, rtol=0)


def test_the_scales_of_the_retina_are_what_the_heads_of_its_last_layer_look_at(models):
    model = load(models, "retina").model
    last = model.decoder.core.layers[-1].attention
    segments = torch.randint(4, 20, (3, 18))
    seen = []
    hook = last.coarse[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(segments)
    hook.remove()
    found = model.decoder.core.representations(segments)
    assert found[4].shape == (3, 4, 2 * last.scales[1].heads * last.head_dim)
    assert found[1].shape == (3, 18, 2 * last.scales[0].heads * last.head_dim)
    torch.testing.assert_close(found[4], seen[0])


def test_the_nearest_are_found_by_comparing_with_every_row():
    generator = np.random.default_rng(8)
    corpus, query = generator.normal(size=(70, 9)), generator.normal(size=9)
    cosines = [float(row @ query / np.linalg.norm(row) / np.linalg.norm(query)) for row in corpus]
    expected = sorted(range(70), key=lambda row: -cosines[row])
    found = neighbors.nearest(torch.tensor(corpus), torch.tensor(query), 11)
    assert [row for row, _ in found] == expected[:11]
    assert [cosine for _, cosine in found] == pytest.approx([cosines[row] for row in expected[:11]])
    without = neighbors.nearest(torch.tensor(corpus), torch.tensor(query), 99, exclude=expected[1])
    assert [row for row, _ in without] == [expected[0], *expected[2:]]


def test_neighbors_answers_queries_by_position_and_by_text(models, tmp_path, capsys):
    text = " ".join(random_lines(1, 40)[5].split())
    command = ["neighbors", str(models / "retina/model.pt"), "--tokens-per-sample", "18", "--top", "2", "--scales", "4"]
    output = ["--position", "95", "--text", f"{text} unheard", "--json", str(tmp_path / "out.json")]
    assert main([*command, *output]) == 0
    by_position, by_text = json.loads((tmp_path / "out.json").read_text())["results"]
    assert by_position["segment"] == 5
    assert by_position["neighbors"]["4x"][0]["segment"] == 31
    assert by_position["query"] == text
    assert {found["segment"] for found in by_text["neighbors"]["4x"]} == {5, 31}
    printed = capsys.readouterr().out
    assert "1 of the 18 tokens of --text are unknown to retina" in printed
    assert "nearest at 4x" in printed
