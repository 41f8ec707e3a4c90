"""Loading a model in Python: a folder that is missing is named in one sentence."""

from pathlib import Path

import pytest

from fairseq_ms.errors import UsageError
from fairseq_ms.models.retina import RetinaLanguageModel


@pytest.mark.parametrize(("folder", "data", "what"), [("none", "here", "model's"), ("here", "none", "data")])
def test_a_missing_folder_is_named(folder: str, data: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(UsageError, match=f"from_pretrained: the {what} folder .*none does not exist"):
        RetinaLanguageModel.from_pretrained(str(tmp_path / folder), "model.pt", str(tmp_path / data))
