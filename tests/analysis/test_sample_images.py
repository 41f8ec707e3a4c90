"""``fairseq-ms sample-images`` on a tiny model of pixels."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import indexed_dataset
from PIL import Image

from fairseq_ms.analysis import sample_images
from tests.helpers.cli import USER_DIR, run_cli

VALUES = random.Random(1)


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of six images as ``preprocess/images/prepare.py`` lays them out: a symbol a value, no end of line."""
    folder = tmp_path_factory.mktemp("pixels")
    (folder / "dict.txt").write_text("".join(f"{value} 1\n" for value in range(256)))
    for split in ("train", "valid"):
        builder = indexed_dataset.make_builder(str(folder / f"{split}.bin"), impl="mmap", vocab_size=260)
        for index in range(6):
            # Each image has a colour of its own, with a ramp in it.
            ramp = (np.arange(sample_images.TOKENS) // 96 + 40 * index) % 256
            builder.add_item(torch.from_numpy(ramp) + 4)
        builder.finalize(str(folder / f"{split}.idx"))
    return folder


@pytest.fixture(scope="module")
def checkpoint(pixels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    run_cli(
        *("fairseq-train", pixels, "--user-dir", USER_DIR, "--task", "language_modeling", "--cpu"),
        *("--arch", "haed_imagenet32", "--encoder-units", "8", "--decoder-embed-dim", "16", "--decoder-layers", "1"),
        *("--position-embed-dim", "4", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2"),
        *("--decoder-units", "8", "--tokens-per-sample", "3072", "--sample-break-mode", "eos", "--batch-size", "2"),
        *("--optimizer", "adam", "--lr", "0.01", "--max-update", "2", "--save-dir", folder, "--num-workers", "0"),
        *("--disable-validation",),
    )
    return folder / "checkpoint_last.pt"


def test_images_are_drawn_and_completed_into_a_grid(pixels: Path, checkpoint: Path, tmp_path: Path) -> None:
    done = run_cli(
        *("fairseq-ms", "sample-images", pixels, "--path", checkpoint, "--png", tmp_path / "new" / "grid.png"),
        *("--count", "1", "--complete", "2", "--keep", "0.75", "--columns", "2", "--scale", "2", "--batch-size", "2"),
    )
    assert "1 images drawn, 2 completed from valid" in done.stdout
    picture = np.asarray(Image.open(tmp_path / "new" / "grid.png"))
    # Three rows of two cells: original and completion, twice, and the drawn one; a line of one pixel around each.
    assert picture.shape == (2 * (3 * 33 + 1), 2 * (2 * 33 + 1), 3)
    small = picture[::2, ::2]
    for index in range(2):
        original = small[33 * index + 1 : 33 * index + 33, 1:33]
        completed = small[33 * index + 1 : 33 * index + 33, 34:66]
        ramp = (np.arange(sample_images.TOKENS) // 96 + 40 * index) % 256
        assert np.array_equal(original.reshape(-1), ramp)
        assert np.array_equal(completed[:24], original[:24])
        assert not np.array_equal(completed[24:], original[24:])
    assert not list((tmp_path / "new").glob(".*")), "nothing half-written is left behind"


def test_drawing_follows_the_model(pixels: Path, checkpoint: Path) -> None:
    """At a temperature near zero, the drawn tokens are those that a forward pass without caches finds likeliest."""
    from fairseq import checkpoint_utils
    from tqdm import tqdm

    overrides = {"data": str(pixels), "tokens_per_sample": sample_images.TOKENS, "sample_break_mode": "eos"}
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], arg_overrides=overrides)
    symbols = sample_images.colour_symbols(task.target_dictionary)
    given = sample_images.given_images(task, "valid", 2)[:, : sample_images.TOKENS - 40]
    with torch.no_grad(), tqdm(disable=True) as bar:
        drawn = sample_images.continued(models[0].eval(), given, symbols, 1e-6, bar, [2])
        source = torch.cat([torch.full((2, 1), 2), drawn[:, :-1]], dim=1)
        likeliest = symbols[models[0](source)[0][:, :, symbols].argmax(dim=2)]
    assert torch.equal(drawn[:, : given.shape[1]], given)
    assert torch.equal(drawn[:, given.shape[1] :], likeliest[:, given.shape[1] :])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--count", "0"), "--count or --complete must be at least 1: got 0 and 0"),
        (("--keep", "1"), "--keep must leave between 1 and 31 rows of 32: got 1.0"),
        (("--temperature", "0"), "--temperature must be greater than 0: got 0.0"),
        (("--columns", "0"), "--columns must be at least 1: got 0"),
        (("--path", "nowhere.pt"), "--path must be a file that fairseq-train wrote: nowhere.pt does not exist"),
    ],
)
def test_flags_out_of_range_are_refused(flags: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    import argparse

    from fairseq_ms.errors import UsageError

    parser = argparse.ArgumentParser()
    sample_images.add_arguments(parser)
    (tmp_path / "model.pt").touch()
    known = ["data", "--path", str(tmp_path / "model.pt"), "--png", str(tmp_path / "grid.png")]
    with pytest.raises(UsageError, match=sentence):
        sample_images.check(parser.parse_args([*known, *flags]))


def test_data_of_something_else_than_images_are_refused() -> None:
    from fairseq_ms.errors import UsageError
    from tests.registry import dictionary

    with pytest.raises(UsageError, match="data must be images"):
        sample_images.colour_symbols(dictionary(256))
