"""Samples as text, for judges and for readers."""

import pytest

from fairseq_ms.analysis.sample_metrics import natural
from fairseq_ms.analysis.sample_metrics.command import Result, _side_by_side

TEXT = [
    'He said, "I don\'t know (yet)."',
    "A well-known 1,234.5 m race.",
]


@pytest.mark.parametrize("text", TEXT)
def test_tokenisation_by_moses_is_undone(text: str) -> None:
    from sacremoses import MosesTokenizer

    words = MosesTokenizer(lang="en").tokenize(text, escape=False, aggressive_dash_splits=True)
    assert len(words) > len(text.split())
    assert natural.text_of(words) == text


def test_wikitexts_marks_and_ends_of_lines_are_text_again() -> None:
    marked = "a 12 @,@ 345 @.@ 6 state @-@ of @-@ the @-@ art band </s> </s> It is new . </s>"
    assert natural.text_of(marked.split(" ")) == "a 12,345.6 state-of-the-art band\n\nIt is new.\n"


def test_a_sample_begins_with_what_joins_it_to_its_context() -> None:
    assert natural.continuation(["Zane", "shook"], ["his", "head", "."]) == ("Zane shook", " his head.")
    assert natural.continuation(["he", "said"], [",", "and"]) == ("he said", ", and")
    assert natural.continuation(["end", ".", "</s>"], ["New"]) == ("end.\n", "New")
    assert natural.continuation([], ["New", "."]) == ("", "New.")


def test_samples_of_all_models_stand_below_their_context() -> None:
    results = [
        Result(
            label,
            {},
            [{"context": "he said", "completions": [f", {word} .", "x"]}, {"context": "y", "completions": ["z"]}],
        )
        for label, word in (("vanilla", "yes"), ("retina", "no"))
    ]
    assert _side_by_side(results, 1) == ["", "prompt 1", "he said", "", "vanilla", ", yes.", "", "retina", ", no."]
    assert len(_side_by_side(results, 9)) == 18
