"""The judges of samples, n-gram and pretrained models, on known answers, and the text they read."""

import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fairseq_ms.errors import UsageError
from fairseq_ms.papers import _judges as judges

ARPA = """\\data\\
ngram 1=6
ngram 2=6
ngram 3=3

\\1-grams:
-1.3010\t<unk>\t0
-99\t<s>\t-0.4150
-0.8239\t</s>\t0
-0.6021\ta\t-0.3010
-0.4559\tb\t-0.2218
-0.9208\tc\t-0.1761

\\2-grams:
-0.3979\t<s> a\t-0.1249
-0.5229\ta b\t-0.0969
-0.2218\tb c\t-0.3010
-0.6990\tb a\t-0.0458
-0.3010\tc </s>
-0.8861\tb </s>

\\3-grams:
-0.1549\t<s> a b
-0.0969\ta b c
-0.2676\tb a b

\\end\\
"""


def needs_kenlm() -> None:
    installable = sys.version_info < (3, 13)
    why = "needs kenlm: pip install kenlm" if installable else "kenlm does not compile on Python 3.13"
    pytest.importorskip("kenlm", reason=why)


def test_ngram_perplexity_is_over_all_words_of_all_samples(tmp_path):
    needs_kenlm()
    (tmp_path / "tiny.arpa").write_text(ARPA)
    model = judges.NGramModel(str(tmp_path / "tiny.arpa"))
    contexts, texts = [["a"], []], [["b", "c"], ["a"]]
    log10 = [-0.1549, -0.0969, -0.3979]
    assert model.perplexity(contexts, texts) == pytest.approx(10 ** (-sum(log10) / 3), rel=1e-4)


def test_what_is_no_ngram_model_is_refused_in_one_sentence(tmp_path, monkeypatch):
    needs_kenlm()
    with pytest.raises(UsageError, match="--ngram-lm must be an ARPA or binary file: nowhere does not exist"):
        judges.NGramModel("nowhere")
    (tmp_path / "bad.arpa").write_text("\\data\\\nno\n")
    with pytest.raises(UsageError, match=r"--ngram-lm must be an ARPA or binary file: .*bad.arpa is not"):
        judges.NGramModel(str(tmp_path / "bad.arpa"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UsageError, match="needs kenlm's program lmplz on the PATH"):
        judges.estimate(["a b"], 4, str(tmp_path))


def test_the_lines_of_a_text_are_those_between_its_ends_of_line() -> None:
    assert list(judges.sentences(["a", "b", "</s>", "c", "</s>"])) == ["a b", "c"]
    assert list(judges.sentences(["</s>", "a", "</s>", "</s>", "b"])) == ["", "a", "", "b"]


def test_lmplz_is_given_the_text_and_its_failure_is_told(tmp_path, monkeypatch):
    # A program in lmplz's place that writes what it was given, or fails.
    program = tmp_path / "bin/lmplz"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n[ \"$2$4\" = 4--skip_symbols ] || { echo 'wrong order' >&2; exit 3; }\ncat\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    path = judges.estimate(["a b", "c"], 4, str(tmp_path))
    assert Path(path).read_text() == "a b\nc\n"
    with pytest.raises(UsageError, match="lmplz ended with 3 \\(wrong order\\)"):
        judges.estimate(["a b"], 2, str(tmp_path))


class TwoTokens(torch.nn.Module):
    """A causal model in Hugging Face's sense: token t + 1 is t + 1 mod 5 with the logit 2, others 0."""

    device = torch.device("cpu")

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=2.0 * F.one_hot((ids + 1) % 5, 5).float())


def spelled(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
    """As Llama's and OPT's tokenizers, which begin every text with a symbol; nothing changes in front of a context."""
    return {"input_ids": [4] * add_special_tokens + [int(word) for word in text.split()]}


def test_pretrained_perplexity_scores_every_token_after_its_context():
    hit, miss = -math.log(math.e**2 / (math.e**2 + 4)), -math.log(1 / (math.e**2 + 4))
    found = judges.pretrained_perplexity(TwoTokens(), spelled, [["0", "1"], ["3"]], [["2", "3", "3"], ["4"]])
    assert found == pytest.approx(math.exp((3 * hit + miss) / 4))


def test_pretrained_perplexity_fits_contexts_into_the_positions_of_the_model():
    model = TwoTokens()
    vars(model)["config"] = SimpleNamespace(max_position_embeddings=4)
    hit = math.log((math.e**2 + 4) / math.e**2)
    found = judges.pretrained_perplexity(model, spelled, [["3", "3", "3", "0", "1"]], [["2", "3"]])
    assert found == pytest.approx(math.exp(hit))
    without = partial(spelled, add_special_tokens=False)
    found = judges.pretrained_perplexity(model, lambda text, **_: without(text), [[]], [["2", "3"]])
    assert found == pytest.approx(math.exp(hit))
    with pytest.raises(UsageError, match="--length must fit into the 4 positions of --hf-lm: got 4 tokens"):
        judges.pretrained_perplexity(model, spelled, [[]], [["1", "2", "3", "4"]])


@pytest.mark.parametrize("text", ['He said, "I don\'t know (yet)."', "A well-known 1,234.5 m race."])
def test_tokenisation_by_moses_is_undone(text: str) -> None:
    from sacremoses import MosesTokenizer

    words = MosesTokenizer(lang="en").tokenize(text, escape=False, aggressive_dash_splits=True)
    assert len(words) > len(text.split())
    assert judges.text_of(words) == text


def test_wikitexts_marks_and_ends_of_lines_are_text_again() -> None:
    marked = "a 12 @,@ 345 @.@ 6 state @-@ of @-@ the @-@ art band </s> </s> It is new . </s>"
    assert judges.text_of(marked.split(" ")) == "a 12,345.6 state-of-the-art band\n\nIt is new.\n"


def test_a_sample_begins_with_what_joins_it_to_its_context() -> None:
    assert judges.continuation(["Zane", "shook"], ["his", "head", "."]) == ("Zane shook", " his head.")
    assert judges.continuation(["he", "said"], [",", "and"]) == ("he said", ", and")
    assert judges.continuation(["end", ".", "</s>"], ["New"]) == ("end.\n", "New")
    assert judges.continuation([], ["New", "."]) == ("", "New.")
