"""Plain sentences out of documentation."""

import pytest

from fairseq_ms_pipeline.prose import is_prose, sentences


def test_marks_go_and_the_words_they_mark_stay():
    text = "Return *item* from the ``list``, or `None' from the stack.\n\n**Note** that the default is False."
    assert list(sentences(text)) == [
        "Return item from the list, or None from the stack.",
        "Note that the default is False.",
    ]


def test_a_paragraph_is_cut_at_its_sentences_and_loses_its_indentation():
    text = "It's a well-known rule.\n    Is there\n    another rule?  Yes, there is one!"
    assert list(sentences(text)) == ["It's a well-known rule.", "Is there another rule?", "Yes, there is one!"]


@pytest.mark.parametrize(
    "text",
    [
        "Call the method obj.close() when done.",
        "Computes a**b for all the numbers.",
        "See https://docs.python.org for more.",
        "The default is 'utf-8' in this case.",
        "Equivalent to a <= b for these sets.",
        "| name | meaning of the word |.",
        "Return a list of all the names",
        "Changed in version 3.4: It is gone.",
        "See the next section:",
        "This was written by Fred L.",
        "Word " * 41 + "end.",
        "",
    ],
)
def test_code_names_tables_headings_and_fragments_are_no_prose(text: str) -> None:
    assert not is_prose(text)
    assert list(sentences(text)) == []


def test_code_examples_are_left_out_with_what_they_print():
    assert list(sentences("An example:\n\n    >>> greet(1)\n    hello there\n\nThis is the end of it.")) == [
        "This is the end of it."
    ]
