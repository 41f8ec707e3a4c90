"""Checkpoints that several tests of the analyses read."""

from pathlib import Path

import pytest

from tests.helpers.trained import NARROW, TINY, random_lines, write_checkpoint, write_corpus

ARCHITECTURES = {
    "retina": ["retina_lm", *TINY, "--scale-windows", "1x=0:4,4x=4:32"],
    "vanilla": ["vanilla_lm", *TINY],
    "topdown": ["multiscale_topdown", *NARROW, "--scale-layers", "16x=1,4x=1,1x=1"],
    "bottomup": ["multiscale_bottomup", *NARROW, "--scale-layers", "16x=1,4x=1,1x=1"],
    "coarse": ["coarse_lm", *NARROW, "--scale-layers", "4x=1"],
    "haed": ["haed"],
}


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with NAME/model.pt of each of ``ARCHITECTURES``, untrained, and their data in ``bin``.

    Lines have 17 words and an end, so that segments of 18 tokens are lines. Line 31 is line 5 again.
    """
    folder = tmp_path_factory.mktemp("models")
    train = random_lines(1, 40)
    train[31] = train[5]
    data = write_corpus(folder / "bin", {"train": train, "test": random_lines(2, 31)})
    for name, flags in ARCHITECTURES.items():
        write_checkpoint(folder / name / "model.pt", data, *flags, "--tokens-per-sample", "64")
    return folder
