"""What commands refuse: one sentence with the flag, the rule and the value, and nothing printed before it."""

import pytest

from tests.helpers.asked import assert_refused

ADAPTIVE = "memory --arch vanilla_lm --decoder-layers 1 --tokens-per-sample 8 --vocabulary 40"
# MODELS is a folder of small models with 64 positions.
REFUSED = [
    ("memory", "--arch must name an architecture"),
    ("memory --arch vanilla_lm --accounting paper", "--accounting is no flag of this command, task and model"),
    ("memory --arch vanilla_lm --no-such-flag", "--no-such-flag is no flag of this command, task and model"),
    ("memory --arch no_such_arch", "--arch must be a name that fairseq knows"),
    ("memory --arch vanilla_lm --decoder-attention-heads 7", "--decoder-attention-heads must divide"),
    ("memory --arch vanilla_lm --vocabulary 3", "--vocabulary must be more than"),
    ("memory --arch transformer_ql_wt103 --vocabulary 1000", "--vocabulary must be at least"),
    ("memory --arch vanilla_lm --fit 0.01", "--fit must leave room for one layer a scale"),
    ("memory --arch vanilla_lm --fit 1 --sweep 64", "--fit and --sweep must not be given together"),
    ("memory --arch vanilla_lm --fit 1 --png out.png", "--fit and --png must not be given together"),
    ("memory --arch haed --fit 1", "what it keeps depends on the tokens"),
    ("memory --arch retina_lm --sweep 64", "--sweep needs layers of full attention"),
    ("memory --path x.pt --arch retina_lm", "--path brings its own flags"),
    ("memory --path MODELS/vanilla/model.pt --vocabulary 50", "--vocabulary must be left out with --path"),
    ("memory --arch vanilla_lm --scale-windows 1x=0:4|1x=0:8 --fit 1", "--fit needs layers that are alike"),
    ("config --list --out out.yaml", "--out must be given with PRESET"),
    ("import MODELS/vanilla/model.pt out --scale-windows=", "--scale-windows must be windows, such as"),
    ("sample MODELS/vanilla/model.pt --prompt w1", "CHECKPOINT must be of data with a manifest.json"),
    ("export MODELS/vanilla/model.pt . --level word", "OUT must be another folder than the one that this command"),
    ("context-window MODELS/vanilla/model.pt --contexts 65", "--contexts must lie between 1 and the 64 positions"),
    ("context-window MODELS/vanilla/model.pt --json no/out.json", "--json must lie in a folder that exists"),
    ("context-window MODELS/vanilla/model.pt --png out.jpg", "--png must end in .png"),
    ("context-shuffle a.pt --limit 1", "--limit must be at least 2"),
    ("context-length --paper --nonsense 3", "--paper prints the paper's models alone: --nonsense must not be given"),
    ("memory --arch vanilla_lm --fit nan", "--fit must be a number of GiB above 0: got nan"),
    ("sample-metrics a.pt --temperature nan", "--temperature must be above 0: got nan"),
    ("plot attention", "--arch must name an architecture"),
    ("plot attention --arch transformer_xl --tokens-per-sample 8 --mem-len 8", "must be a multi-scale model"),
    (f"{ADAPTIVE} --adaptive-softmax-cutoff 20,10", "--adaptive-softmax-cutoff must"),
    (f"{ADAPTIVE} --adaptive-softmax-cutoff 0,10", "--adaptive-softmax-cutoff must"),
    (f"{ADAPTIVE} --adaptive-softmax-cutoff 10,10", "--adaptive-softmax-cutoff must"),
    (f"{ADAPTIVE} --adaptive-input --adaptive-input-cutoff 1,20", "--adaptive-input-cutoff must"),
    (f"{ADAPTIVE} --adaptive-input --adaptive-input-cutoff __import__('os')", "--adaptive-input-cutoff must"),
    ("prepare", "the following arguments are required: DATASET"),
    ("prepare nothing", "invalid choice: 'nothing' (choose from "),
    ("prepare text --out x --input missing", "--input missing does not exist."),
    ("prepare text --input x", "fairseq-ms prepare text: error: the following arguments are required: --out"),
    ("perplexity MODELS/bin/dict.txt", "a checkpoint must be a file that training wrote, unchanged: "),
]


@pytest.mark.parametrize(("command", "sentence"), REFUSED)
def test_bad_values_are_refused_in_one_sentence(models, command, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(command.replace("MODELS", str(models)).split(), sentence, capsys)
