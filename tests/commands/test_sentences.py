"""What commands tell newcomers of a path that is no checkpoint."""

from pathlib import Path

import pytest

from fairseq_ms import cli


@pytest.mark.parametrize(
    ("made", "asked", "rest"),
    [
        ("", "run", "does not exist"),
        ("run/", "run", "is a folder without a checkpoint"),
        ("run/checkpoint_last.pt", "run", "is a folder: did you mean run/checkpoint_last.pt?"),
        ("run/checkpoint_1_2.pt run/checkpoint_best.pt", "run", "is a folder: did you mean run/checkpoint_best.pt?"),
        ("run/checkpoint3.pt", "run", "is a folder: did you mean run/checkpoint3.pt?"),
        ("run/checkpoint_last.pt", "run/best.pt", "does not exist: did you mean run/checkpoint_last.pt?"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_told_what_it_is(
    made: str, asked: str, rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in map(Path, made.split()):
        Path("run").mkdir(exist_ok=True)
        if file.name != "run":
            file.touch()
    for command in (["perplexity", asked], ["context-shuffle", f"mine={asked}"]):
        assert cli.main(command) == 2
        said = f"fairseq-ms: CHECKPOINT must be a file that training wrote: {asked} {rest}\n"
        assert capsys.readouterr().err == said
