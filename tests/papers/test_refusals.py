"""What the papers' commands refuse: one sentence with the flag, the rule and the value."""

import shlex

import pytest

from tests.helpers.asked import assert_refused

# MODELS is a folder of small models with 64 positions.
REFUSED = [
    ("context-length --path MODELS/retina/model.pt", "transformer_ql or transformer_xl: got retina_lm"),
    ("context-length", "--arch, --path or --paper must be given"),
    ("context-length --paper --arch transformer_xl", "--paper prints the paper's models alone: --arch must not"),
    ("nll-by-frequency MODELS/vanilla/model.pt --bins 1000", "--bins must lie between 1 and the 24 symbols"),
    ("nll-by-frequency MODELS/vanilla/model.pt --train-subset dev", "there is no 'dev'"),
    ("context-shuffle MODELS/vanilla/model.pt --damaged 64", "--damaged must be at least 1 and below the window"),
    ("neighbors MODELS/haed/model.pt", "haed is a haed, which does not"),
    ("neighbors MODELS/retina/model.pt --scales 8", "--scales must be among those of retina, 1x, 4x: got 8x"),
    ("neighbors MODELS/retina/model.pt --tokens-per-sample 3", "--tokens-per-sample must hold a block of 4 tokens"),
    ("neighbors MODELS/retina/model.pt --tokens-per-sample 65", "must lie between 1 and the 64 positions of retina"),
    ("neighbors MODELS/retina/model.pt --tokens-per-sample 18 --position 900", "--position must lie in the 40 segm"),
    ("neighbors MODELS/retina/model.pt --text ''", "length of --text must lie between 1 and the 64 positions"),
    ("neighbors MODELS/transformer_xl/model.pt", "transformer_xl, which does not"),
    ("nll-by-frequency MODELS/transformer_xl/model.pt --context-window 3", "transformer_xl reads the text once, got 3"),
    ("tradeoff MODELS --checkpoint none.pt", "RUNS must be a folder with runs: no none.pt lies below"),
    ("sample-metrics MODELS/vanilla/model.pt --prefix-size 40 --length 30", "up to less than the 64 positions"),
    ("sample-metrics MODELS/vanilla/model.pt --temperature 0 --length 9", "--temperature must be above 0: got 0.0"),
    ("sample-metrics MODELS/vanilla/model.pt --ngram-lm x --estimate-ngram-lm", "must not be given together"),
]


@pytest.mark.parametrize(("command", "sentence"), REFUSED)
def test_bad_values_are_refused_in_one_sentence(models, command, sentence, capsys):
    assert_refused(shlex.split(command.replace("MODELS", str(models))), sentence, capsys)
