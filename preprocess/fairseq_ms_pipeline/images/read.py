"""32 x 32 RGB images out of the files people have: npz and pickled batches, CIFAR-10, PNG folders and zips."""

from __future__ import annotations

import io
import logging
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, UnidentifiedImageError

from fairseq_ms_pipeline.sources import TextFile, contents, matches, text_files

# Pillow tells of every chunk of every PNG once somebody has turned logging up.
logging.getLogger("PIL").setLevel(logging.WARNING)

SIDE = 32
TOKENS = SIDE * SIDE * 3
BATCHES = ("train_data_batch_*", "val_data", "data_batch_*", "test_batch")
NPZ = ("train_data_batch_*.npz", "val_data.npz", "*.npz")
CIFAR_BINARY = ("data_batch_*.bin", "test_batch.bin")
PICTURES = ("*.png",)
WANTED = (*BATCHES, *NPZ, *CIFAR_BINARY, *PICTURES)
TEST_NAMES = ("val_data*", "test_batch*")


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


def raster(planes_BD: np.ndarray) -> np.ndarray:
    """Images as the batches keep them (B, 3 * 1024: all red, all green, all blue) in raster order, RGB by pixel."""
    return planes_BD.reshape(-1, 3, SIDE * SIDE).transpose(0, 2, 1).reshape(-1, TOKENS)


def images(inputs: list[Path], advance: Callable[[int], object]) -> Iterator[tuple[str, np.ndarray]]:
    """Each wanted file's name and images, (B, 3072) uint8 in raster RGB order.

    ValueError names the file that has another shape or type, or that is no image.
    """
    for file in text_files(inputs, wanted, advance):
        if matches(file.name, PICTURES):
            found = _picture(file)
        elif matches(file.name, NPZ):
            found = raster(_checked(_npz(file), file.name))
        elif matches(file.name, CIFAR_BINARY):
            found = raster(_binary(file))
        else:
            found = raster(_checked(_pickled(file), file.name))
        yield file.name, found


def _checked(data: object, name: str) -> np.ndarray:
    shape, kind = getattr(data, "shape", None), getattr(data, "dtype", None)
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != TOKENS or data.dtype != np.uint8:
        raise ValueError(f"{name}: 'data' must be uint8 of shape (images, {TOKENS}), but is {kind} of {shape}.")
    return data


def _npz(file: TextFile) -> object:
    content = io.BytesIO(contents(file))
    try:
        # allow_pickle stays False: an array of objects is refused, not run.
        with np.load(content, allow_pickle=False) as arrays:
            return arrays["data"]
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file.name} is no npz file with an array 'data' ({error}).") from None


def _pickled(file: TextFile) -> object:
    content = io.BytesIO(contents(file))
    try:
        batch = _ArraysOnly(content, encoding="bytes").load()
    except (pickle.UnpicklingError, ValueError, EOFError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise ValueError(f"{file.name} is no pickled batch of images ({error}).") from None
    return batch.get("data", batch.get(b"data")) if isinstance(batch, dict) else None


def _binary(file: TextFile) -> np.ndarray:
    content = np.frombuffer(contents(file), dtype=np.uint8)
    if content.size == 0 or content.size % (TOKENS + 1):
        raise ValueError(f"{file.name}: {content.size:,} bytes are no whole number of labelled 32 x 32 images.")
    return content.reshape(-1, TOKENS + 1)[:, 1:]


def _picture(file: TextFile) -> np.ndarray:
    content = io.BytesIO(contents(file))
    try:
        with Image.open(content) as picture:
            picture.load()
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{file.name} is no readable image ({error}).") from None
    if picture.size != (SIDE, SIDE) or picture.mode != "RGB":
        width, height = picture.size
        raise ValueError(f"{file.name} must be 32 x 32 in RGB, but is {width} x {height} in {picture.mode}.")
    return np.asarray(picture, dtype=np.uint8).reshape(1, TOKENS)


def photographs() -> Iterator[tuple[str, np.ndarray]]:
    """Crops of 32 x 32 without overlap from the two photographs that come with scikit-learn."""
    from sklearn.datasets import load_sample_images

    sample = load_sample_images()
    for name, photo in zip(sample.filenames, sample.images, strict=True):
        rows, columns = (size // SIDE for size in photo.shape[:2])
        whole = photo[: rows * SIDE, : columns * SIDE].reshape(rows, SIDE, columns, SIDE, 3)
        yield Path(name).name, whole.transpose(0, 2, 1, 3, 4).reshape(-1, TOKENS)
