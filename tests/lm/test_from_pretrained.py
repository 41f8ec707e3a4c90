"""Loading a model in Python: a path that is missing is named in one sentence."""

from pathlib import Path

import pytest

from fairseq_ms.errors import UsageError
from fairseq_ms.models.retina import RetinaLanguageModel


@pytest.mark.parametrize(
    ("folder", "file", "data", "sentence"),
    [
        ("none", "model.pt", "data", r"from_pretrained: the model's folder .*none does not exist"),
        ("here", "model.pt", "data", r"from_pretrained: the checkpoint .*here/model.pt does not exist"),
        ("here", "other.pt", "none", r"from_pretrained: the data folder .*none does not exist"),
    ],
)
def test_a_missing_path_is_named(folder: str, file: str, data: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "here" / "other.pt").touch()
    with pytest.raises(UsageError, match=sentence):
        RetinaLanguageModel.from_pretrained(str(tmp_path / folder), file, str(tmp_path / data))
