"""What the analyses refuse: one sentence with the flag, the rule and the value, and nothing printed before it."""

import shlex

import pytest

from fairseq_ms.cli import main

# MODELS is a folder of small models with 64 positions.
REFUSED = [
    ("memory", "--arch must name an architecture"),
    ("memory --arch vanilla_lm --accounting paper", "--accounting is no flag of this command, task and model"),
    ("memory --arch vanilla_lm --no-such-flag", "--no-such-flag is no flag of this command, task and model"),
    ("memory --arch no_such_arch", "--arch must be a name that fairseq knows"),
    ("memory --arch vanilla_lm --decoder-attention-heads 7", "--decoder-attention-heads must divide"),
    ("memory --arch vanilla_lm --vocabulary 3", "--vocabulary must be more than"),
    ("memory --arch transformer_ql_wt103 --vocabulary 1000", "up to the dictionary's 1000: got '20000,40000"),
    ("memory --arch vanilla_lm --fit 0.01", "--fit must leave room for one layer a scale"),
    ("memory --arch vanilla_lm --fit 1 --sweep 64", "--fit and --sweep must not be given together"),
    ("memory --arch vanilla_lm --fit 1 --png out.png", "--fit and --png must not be given together"),
    ("memory --arch haed --fit 1", "what it keeps depends on the tokens"),
    ("memory --arch retina_lm --sweep 64", "--sweep needs layers of full attention"),
    ("memory --path x.pt --arch retina_lm", "--path brings its own flags"),
    ("context-length --path MODELS/retina/model.pt", "transformer_ql or transformer_xl: got retina_lm"),
    ("context-length", "--arch, --path or --paper must be given"),
    ("context-length --paper --arch transformer_xl", "--paper prints the paper's models alone: --arch must not"),
    ("nll-by-frequency MODELS/vanilla/model.pt --bins 1000", "--bins must lie between 1 and the 24 symbols"),
    ("nll-by-frequency MODELS/vanilla/model.pt --train-subset dev", "there is no 'dev'"),
    ("context-shuffle MODELS/vanilla/model.pt --damaged 64", "--damaged must be at least 1 and below the window"),
    ("context-window MODELS/vanilla/model.pt --contexts 65", "--contexts must lie between 1 and the 64 positions"),
    ("context-window MODELS/vanilla/model.pt --json no/out.json", "--json must lie in a folder that exists"),
    ("context-window MODELS/vanilla/model.pt --png out.jpg", "--png must end in .png"),
    ("neighbors MODELS/haed/model.pt", "haed is a haed, which does not"),
    ("neighbors MODELS/retina/model.pt --scales 8", "--scales must be among those of retina, 1x, 4x: got 8x"),
    ("neighbors MODELS/retina/model.pt --tokens-per-sample 3", "--tokens-per-sample must hold a block of 4 tokens"),
    ("neighbors MODELS/retina/model.pt --tokens-per-sample 65", "must lie between 1 and the 64 positions of retina"),
    ("neighbors MODELS/retina/model.pt --tokens-per-sample 18 --position 900", "--position must lie in the 40 segm"),
    ("neighbors MODELS/retina/model.pt --text ''", "length of --text must lie between 1 and the 64 positions"),
    ("sample-metrics MODELS/vanilla/model.pt --prefix-size 40 --length 30", "up to less than the 64 positions"),
    ("sample-metrics MODELS/vanilla/model.pt --temperature 0 --length 9", "--temperature must be above 0: got 0.0"),
    ("sample-metrics MODELS/vanilla/model.pt --ngram-lm x --estimate-ngram-lm", "must not be given together"),
]


@pytest.mark.parametrize(("command", "sentence"), REFUSED)
def test_bad_values_are_refused_in_one_sentence(models, command, sentence, capsys):
    assert main(shlex.split(command.replace("MODELS", str(models)))) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--batch-size 0", "--sweep 64,x"])
def test_numbers_below_one_and_words_are_refused_by_the_parser(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["memory", "--arch", "vanilla_lm", *flag.split()])
    assert "must be a whole number of at least 1" in capsys.readouterr().err
