"""``fairseq-ms sample-images`` on a tiny model of pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import indexed_dataset
from PIL import Image

from fairseq_ms.cli import main
from fairseq_ms.errors import UsageError
from fairseq_ms.papers import sample_images
from fairseq_ms.tools import checkpoints
from tests.helpers.trained import write_checkpoint
from tests.registry import dictionary

# Images of 8 x 8 take a sixteenth of the time.
SIDE, TOKENS = 8, 192
SIZES = (
    "--encoder-units 8 --decoder-embed-dim 16 --decoder-layers 1 --position-embed-dim 4 --decoder-ffn-embed-dim 16 "
    "--decoder-attention-heads 2 --decoder-units 8 --tokens-per-sample 192 --sample-break-mode eos"
)


def ramp(index: int) -> np.ndarray:
    """The image of this number: a colour of its own, and a ramp in it."""
    return (np.arange(TOKENS) // 24 + 40 * index) % 256


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_images, "SIDE", SIDE)
    monkeypatch.setattr(sample_images, "TOKENS", TOKENS)


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of six images as ``fairseq-ms prepare images`` lays them out: a symbol a value, no end of line."""
    folder = tmp_path_factory.mktemp("pixels")
    (folder / "dict.txt").write_text("".join(f"{value} 1\n" for value in range(256)))
    for split, cut in (("train", 0), ("valid", 0), ("cut", 1)):
        builder = indexed_dataset.make_builder(str(folder / f"{split}.bin"), impl="mmap", vocab_size=260)
        for index in range(6):
            builder.add_item(torch.from_numpy(ramp(index))[cut:] + 4)
        builder.finalize(str(folder / f"{split}.idx"))
    return folder


@pytest.fixture(scope="module")
def path(pixels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "model.pt"
    return write_checkpoint(file, pixels, "haed_imagenet32", *SIZES.split())


def test_images_are_drawn_and_completed_into_a_grid(pixels: Path, path: Path, tmp_path: Path, capsys) -> None:
    png = tmp_path / "new/grid.png"
    sizes = ["--count", "1", "--complete", "2", "--keep", "0.75", "--columns", "2", "--scale", "2", "--batch-size", "2"]
    assert main(["sample-images", str(pixels), "--path", str(path), "--png", str(png), *sizes]) == 0
    assert "1 images drawn, 2 completed from valid" in capsys.readouterr().out
    picture = np.asarray(Image.open(png))
    # Three rows of two cells: original and completion, twice, and the drawn one; a line of one pixel around each.
    assert picture.shape == (2 * (3 * 9 + 1), 2 * (2 * 9 + 1), 3)
    small = picture[::2, ::2]
    for index in range(2):
        original = small[9 * index + 1 : 9 * index + 9, 1:9]
        completed = small[9 * index + 1 : 9 * index + 9, 10:18]
        assert np.array_equal(original.reshape(-1), ramp(index))
        assert np.array_equal(completed[:6], original[:6])
        assert not np.array_equal(completed[6:], original[6:])
    assert not list((tmp_path / "new").glob(".*")), "nothing half-written is left behind"


def test_drawing_follows_the_model(pixels: Path, path: Path) -> None:
    """At a temperature near zero, the drawn tokens are those that a forward pass without caches finds likeliest."""
    checkpoint = checkpoints.load(str(path), str(pixels), cpu=True)
    symbols = sample_images.colour_symbols(checkpoint.dictionary)
    given = sample_images.given_images(checkpoint, "valid", 2)[:, : TOKENS - 40]
    with torch.no_grad():
        drawn = sample_images.drawn(checkpoint, given, symbols, 1e-6, batch_size=1)
        source = torch.cat([torch.full((2, 1), 2), drawn[:, :-1]], dim=1)
        likeliest = symbols[checkpoint.model(source)[0][:, :, symbols].argmax(dim=2)]
    assert torch.equal(drawn[:, : given.shape[1]], given)
    assert torch.equal(drawn[:, given.shape[1] :], likeliest[:, given.shape[1] :])


@pytest.mark.parametrize(
    "flags",
    [
        *("--count 0", "--complete -1", "--keep 1", "--temperature 0", "--path nowhere.pt", "--complete 7"),
        *("data must have 192 tokens --complete 1 --gen-subset cut", "--gen-subset dev --complete 1"),
    ],
)
def test_flags_out_of_range_are_refused(pixels: Path, path: Path, flags: str, tmp_path: Path, capsys) -> None:
    known = ["sample-images", str(pixels), "--path", str(path), "--png", str(tmp_path / "grid.png")]
    named, given = flags.rpartition("tokens ")[0], flags.rpartition("tokens ")[2].split()
    assert main([*known, *given]) == 2
    assert (named or given[0]) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_data_of_something_else_than_images_are_refused() -> None:
    with pytest.raises(UsageError, match="data must be images"):
        sample_images.colour_symbols(dictionary(256))
