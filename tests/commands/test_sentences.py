"""What commands tell newcomers of a path that is no checkpoint."""

from pathlib import Path

import pytest

from fairseq_ms import cli


@pytest.mark.parametrize(
    ("files", "rest"),
    [
        (None, "does not exist"),
        ([], "is a folder without a checkpoint"),
        (["checkpoint_last.pt"], "is a folder: did you mean {}/checkpoint_last.pt?"),
        (["checkpoint_1_2.pt", "checkpoint_best.pt"], "is a folder: did you mean {}/checkpoint_best.pt?"),
        (["checkpoint3.pt"], "is a folder: did you mean {}/checkpoint3.pt?"),
    ],
)
def test_a_path_that_is_no_file_is_told_what_it_is(files: list[str] | None, rest: str, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    for file in files or []:
        folder.mkdir(exist_ok=True)
        (folder / file).touch()
    if files == []:
        folder.mkdir()
    sentence = f"CHECKPOINT must be a file that training wrote: {folder} {rest.format(folder)}"
    for command in (["perplexity", str(folder)], ["context-shuffle", f"mine={folder}"]):
        assert cli.main(command) == 2
        assert capsys.readouterr().err == f"fairseq-ms: {sentence}\n"


def test_a_file_that_is_not_there_yet_is_told_of_those_beside_it(tmp_path: Path, capsys) -> None:
    (tmp_path / "checkpoint_last.pt").touch()
    assert cli.main(["perplexity", str(tmp_path / "checkpoint_best.pt")]) == 2
    assert f"does not exist: did you mean {tmp_path}/checkpoint_last.pt?" in capsys.readouterr().err
