"""32 x 32 RGB images out of the files people have: npz and pickled batches, CIFAR-10, PNG folders and zips."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from fairseq_ms_pipeline.sources import DAMAGE, contents, matches, text_files

# Pillow tells of every chunk of every PNG once somebody has turned logging up.
logging.getLogger("PIL").setLevel(logging.WARNING)

SIDE = 32
TOKENS = SIDE * SIDE * 3
TEST_NAMES = ("val_data*", "test_batch*")
# RuntimeError is that of encrypted archives, and of methods of compression that are not known.
_UNFIT = (AttributeError, LookupError, OSError, RuntimeError, SyntaxError, TypeError, ValueError)
UNREADABLE = (*DAMAGE, *_UNFIT, pickle.UnpicklingError)


class _ArraysOnly(pickle.Unpickler):
    """Reads pickled batches, which need nothing but NumPy arrays, and refuses every other object."""

    # The function that array pickles name, whatever module NumPy keeps it in.
    allowed = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}

    def find_class(self, module: str, name: str) -> object:
        if module.split(".")[0] == "numpy" and name in self.allowed:
            return self.allowed[name]
        if (module, name) == ("_codecs", "encode"):
            # How a pickle of an old protocol spells bytes.
            return lambda text, encoding: text.encode(encoding)
        raise ValueError(f"it holds {module}.{name}, which is no array")


def given_split(name: str) -> str | None:
    """The split that a file's name or its folders tell of, None if they tell of none."""
    folders = PurePosixPath(name).parts[:-1]
    if matches(name, TEST_NAMES) or "test" in folders:
        return "test"
    if "valid" in folders or "val" in folders:
        return "valid"
    return None


def wanted(name: str) -> bool:
    """Whether a file inside the inputs holds images."""
    return matches(name, WANTED)


def images(inputs: list[Path], advance: Callable[[int], object]) -> Iterator[tuple[str, np.ndarray]]:
    """Each wanted file's name and images, (B, 3072) uint8 in raster RGB order.

    ValueError names the file that is damaged, or that holds other than images of 32 x 32.
    """
    for file in text_files(inputs, wanted, advance):
        kind, read = next((kind, read) for names, kind, read in FORMS if matches(file.name, names))
        content = io.BytesIO(contents(file))
        try:
            found = read(content)
        except UNREADABLE as error:
            raise ValueError(f"{file.name} is no {kind} ({error}).") from None
        yield file.name, found


def raster(planes_BD: object) -> np.ndarray:
    """Images as the batches keep them (B, 3 * 1024: all red, all green, all blue) in raster order, RGB by pixel."""
    kind, shape = getattr(planes_BD, "dtype", None), getattr(planes_BD, "shape", ())
    if not isinstance(planes_BD, np.ndarray) or kind != np.uint8 or shape[1:] != (TOKENS,):
        raise ValueError(f"'data' is {kind} of {shape}")
    return planes_BD.reshape(-1, 3, SIDE * SIDE).transpose(0, 2, 1).reshape(-1, TOKENS)


def _npz(content: io.BytesIO) -> np.ndarray:
    # allow_pickle stays False: an array of objects is refused, not run.
    with np.load(content, allow_pickle=False) as arrays:
        return raster(arrays["data"])


def _pickled(content: io.BytesIO) -> np.ndarray:
    batch = _ArraysOnly(content, encoding="bytes").load()
    return raster(batch.get("data", batch.get(b"data")))


def _binary(content: io.BytesIO) -> np.ndarray:
    # A label stands before each image.
    return raster(np.frombuffer(content.getvalue(), dtype=np.uint8).reshape(-1, TOKENS + 1)[:, 1:])


def _picture(content: io.BytesIO) -> np.ndarray:
    with Image.open(content) as picture:
        picture.load()
    if picture.size != (SIDE, SIDE) or picture.mode != "RGB":
        width, height = picture.size
        raise ValueError(f"it is {width} x {height} in {picture.mode}")
    return np.asarray(picture, dtype=np.uint8).reshape(1, TOKENS)


# The first whose pattern a file's name has.
FORMS: tuple[tuple[tuple[str, ...], str, Callable[[io.BytesIO], np.ndarray]], ...] = (
    (("*.png",), "image of 32 x 32 pixels in RGB", _picture),
    (("*.npz",), f"npz file of an array 'data', uint8 of (images, {TOKENS})", _npz),
    (("data_batch_*.bin", "test_batch.bin"), "whole number of labelled 32 x 32 images", _binary),
    (
        ("train_data_batch_*", "val_data", "data_batch_*", "test_batch"),
        f"pickled batch of an array 'data', uint8 of (images, {TOKENS})",
        _pickled,
    ),
)
WANTED = tuple(name for names, _, _ in FORMS for name in names)


def photographs() -> Iterator[tuple[str, np.ndarray]]:
    """Crops of 32 x 32 without overlap from the two photographs that come with scikit-learn."""
    from sklearn.datasets import load_sample_images

    sample = load_sample_images()
    for name, photo in zip(sample.filenames, sample.images, strict=True):
        rows, columns = (size // SIDE for size in photo.shape[:2])
        whole = photo[: rows * SIDE, : columns * SIDE].reshape(rows, SIDE, columns, SIDE, 3)
        yield Path(name).name, whole.transpose(0, 2, 1, 3, 4).reshape(-1, TOKENS)
