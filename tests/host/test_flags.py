"""What fairseq's parsers say about a flag or a name that they do not know: one sentence with the nearest one."""

import pytest
from fairseq import options

from fairseq_ms.analysis import untrained
from fairseq_ms.errors import UsageError


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--arch retina_ml", "--arch must be a name that fairseq knows, such as retina_lm: got 'retina_ml'"),
        ("--arch zzzzzz", "--arch must be a name that fairseq knows (--help lists them): got 'zzzzzz'"),
        ("--criterion linear_cross_entrop", "--criterion must be a name that fairseq knows, such as linear_cross_ent"),
        ("--ddp-backend gloo", "--ddp-backend must be one of c10d, fully_sharded, legacy_ddp, no_c10d, pytorch_ddp, "),
        (
            "--arch retina_lm --decoder-embed-dm 128",
            "--decoder-embed-dm is no flag of this command and model: did you mean --decoder-embed-dim?",
        ),
        ("--arch retina_lm --decoder-embed-dm=128", "--decoder-embed-dm is no flag of this command and model: did "),
        ("--arch retina_lm --zzzzzz 128", "--zzzzzz is no flag of this command and model (--help lists those it has)"),
        (
            "--arch transformer_ql --decoder-layers 2",
            "--decoder-layers is no flag of this model: --scale-layers says how many layers it has at each scale",
        ),
        ("--arch retina_lm --lr", "argument --lr: expected one argument"),
        ("--arch retina_lm and more", "unrecognized arguments: and more"),
    ],
)
def test_what_the_parser_does_not_know_is_one_sentence(flags: str, sentence: str, capsys) -> None:
    parser = options.get_training_parser(default_task="language_modeling")
    with pytest.raises(SystemExit) as end:
        options.parse_args_and_arch(parser, ["data", *flags.split()])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{parser.prog}: error: {sentence}")


def test_commands_that_take_fairseqs_flags_say_the_same() -> None:
    with pytest.raises(UsageError, match=r"^--arch must be a name that fairseq knows, such as retina_lm: got 'retina_"):
        untrained.parse(["--arch", "retina_ml"])
