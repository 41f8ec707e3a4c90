"""Text as characters and bytes, images as colour values: nothing is lost, nothing unexpected is accepted."""

import io
import pickle
import random

import numpy as np
import pytest
from fairseq.data import Dictionary, TokenBlockDataset, indexed_dataset
from PIL import Image

from fairseq_ms_pipeline.files import read_json
from fairseq_ms_pipeline.image_files import TOKENS, photographs
from fairseq_ms_pipeline.text import byte_symbols, characters, undone
from tests.preprocess.sample import archived, prepare


def read_back(out, split):
    dictionary = Dictionary.load(str(out / "bin" / "dict.txt"))
    return dictionary, indexed_dataset.make_dataset(str(out / "bin" / split), impl="mmap")


@pytest.mark.parametrize("unit", ["char", "byte"])
def test_wikitext_becomes_characters_and_back(tmp_path, unit):
    lines = [" ", " = Title = ", " ", " A <unk> 日本 name @-@ d ▁ é @@ </s> . "]
    text = "".join(line + "\n" for line in lines * 5)
    splits = ("train", "valid", "test")
    archived(tmp_path / "wikitext-103-v1.zip", {f"wikitext-103/wiki.{split}.tokens": text for split in splits})
    out = tmp_path / "out"
    prepare("chars", "--input", tmp_path / "wikitext-103-v1.zip", "--out", out, "--level", unit)
    kept = "".join(" ".join(line.split()).replace("▁", "_") + "\n" for line in lines * 5)
    assert (out / "text" / "test.txt").read_text() == kept
    dictionary, data = read_back(out, "test")
    symbols = [dictionary.string(data[i]) for i in range(len(data))]
    assert "".join(undone(line, unit) + "\n" for line in symbols) == kept
    counts = read_json(out / "manifest.json")["splits"]["test"]
    assert counts["targets"] == (len(kept) if unit == "char" else len(kept.encode()))
    assert (counts["characters"], counts["bytes"], counts["unknown"]) == (len(kept), len(kept.encode()), 0)


def test_any_line_survives_being_spelled_in_characters_or_bytes():
    draw = random.Random(7)
    for _ in range(300):
        words = ["".join(draw.choices("ab<>@_|0xé東😀\\", k=draw.randint(1, 6))) for _ in range(4)]
        line = " ".join(words)
        assert undone(characters(line), "char") == line
        assert undone(byte_symbols(line), "byte") == line
        assert len(byte_symbols(line).split(" ")) == len(line.encode())


def some_images(count, seed=0):
    """Images (B, 32, 32, 3) of random colours."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def planes(images_BHWC):
    """As CIFAR-10 and ImageNet-32 keep them: all red, all green, all blue."""
    return images_BHWC.transpose(0, 3, 1, 2).reshape(len(images_BHWC), -1)


def png(image_HWC, mode="RGB"):
    content = io.BytesIO()
    Image.fromarray(image_HWC).convert(mode).save(content, "png")
    return content.getvalue()


def npz(**arrays):
    """A file as ImageNet-32's."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    return content.getvalue()


def decoded(out, split):
    """Colour values (B, 3072) by fairseq's own reading."""
    dictionary, data = read_back(out, split)
    values = np.array([int(symbol) if symbol.isdigit() else -1 for symbol in dictionary.symbols])
    return values[np.stack([data[i].numpy() for i in range(len(data))])]


def as_pickles(images_BHWC, key="data", **more):
    return pickle.dumps({key: planes(images_BHWC), "labels": [1] * len(images_BHWC), **more}, protocol=2)


def as_binary(images_BHWC):
    return np.insert(planes(images_BHWC), 0, 7, axis=1).tobytes()


LAYOUTS = {
    "Imagenet32_npz.zip": ("Imagenet32/train_data_batch_{}.npz", "val/val_data.npz", lambda x: npz(data=planes(x))),
    "batches.zip": ("train_data_batch_{}", "val_data", lambda x: as_pickles(x, mean=np.zeros(TOKENS))),
    "cifar-10-python.tar.gz": ("cifar/data_batch_{}", "cifar/test_batch", lambda x: as_pickles(x, b"data")),
    "cifar-10-binary.tar.gz": ("cifar/data_batch_{}.bin", "cifar/test_batch.bin", as_binary),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_batches_keep_their_test_images_and_hold_out_valid(tmp_path, name):
    train, test = some_images(300, 1), some_images(40, 2)
    of_train, of_test, content = LAYOUTS[name]
    files = {of_train.format(n): content(train[n * 100 - 100 : n * 100]) for n in (1, 2, 3)}
    archived(tmp_path / name, {**files, of_test: content(test)})
    prepare("images", "--input", tmp_path / name, "--out", tmp_path / "out", "--valid-fraction", "0.2")
    assert (decoded(tmp_path / "out", "test") == test.reshape(40, -1)).all()
    drawn = [decoded(tmp_path / "out", split) for split in ("train", "valid")]
    assert 30 < len(drawn[1]) < 90
    assert sorted(map(bytes, np.concatenate(drawn).astype(np.uint8))) == sorted(map(bytes, train.reshape(300, -1)))
    counts = read_json(tmp_path / "out" / "manifest.json")["splits"]
    assert counts["train"]["images"] + counts["valid"]["images"] == 300
    assert counts["test"]["targets"] == counts["test"]["bytes"] == 40 * 3072


def test_folders_and_zips_of_png_are_read_and_named_splits_kept(tmp_path):
    found = some_images(60)
    splits = ("train", "valid", "test")
    files = {f"{splits[index % 3]}/frog/{index:03d}.png": png(image) for index, image in enumerate(found)}
    prepare("images", "--input", archived(tmp_path / "pictures.zip", files), "--out", tmp_path / "out")
    for index, split in enumerate(splits):
        assert (decoded(tmp_path / "out", split) == found[index::3].reshape(20, -1)).all()


def test_the_photographs_are_cut_into_crops_each_a_block_that_sees_nothing_of_the_one_before(tmp_path):
    from sklearn.datasets import load_sample_image

    first = next(iter(photographs()))[1]
    assert (first[21].reshape(32, 32, 3) == load_sample_image("china.jpg")[32:64, 32:64]).all()
    prepare("images", "--photographs", "--out", tmp_path / "out")
    crops = np.concatenate([images_BT for _, images_BT in photographs()])
    found = np.concatenate([decoded(tmp_path / "out", split) for split in ("train", "valid", "test")])
    assert sorted(map(bytes, found.astype(np.uint8))) == sorted(map(bytes, crops))
    _, data = read_back(tmp_path / "out", "train")
    blocks = TokenBlockDataset(data, data.sizes, TOKENS, pad=1, eos=2, break_mode="none", include_targets=True)
    assert len(blocks) == len(data) > 400
    for index in range(0, len(data), 50):
        source, target, _ = blocks[index]
        assert (target == data[index]).all()
        assert source[0] == 2
        assert (source[1:] == data[index][:-1]).all()


class Payload:
    """What a malicious pickle would hold."""

    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("val_data.npz", lambda: npz(data=some_images(4))[:-30], "val_data.npz is no npz file"),
        ("val_data.npz", lambda: npz(data=np.array([Payload()], object)), "val_data.npz is no npz file"),
        ("val_data.npz", lambda: npz(other=np.zeros(3)), "val_data.npz is no npz file of an array 'data'"),
        ("small.png", lambda: png(some_images(1)[0][:28]), "RGB (it is 32 x 28 in RGB)"),
        ("grey.png", lambda: png(some_images(1)[0], "L"), "grey.png is no image of 32 x 32 pixels in RGB (it is"),
        ("cut.png", lambda: png(some_images(1)[0])[:900], "cut.png is no image of 32 x 32 pixels in RGB ("),
        ("val_data", lambda: pickle.dumps({"data": Payload()}), "holds builtins.print, which is no array"),
        ("val_data", lambda: pickle.dumps({"data": np.zeros((2, 3000), np.uint8)}), "is uint8 of (2, 3000)"),
        ("val_data", lambda: pickle.dumps({"data": np.zeros((2, 3072), np.int64)}), "is int64 of (2, 3072)"),
        ("val_data", lambda: pickle.dumps(["other"]), "val_data is no pickled batch"),
        ("data_batch_1.bin", lambda: b"x" * 3074, "data_batch_1.bin is no whole number of labelled 32 x 32 images"),
    ],
)
def test_what_is_no_image_of_32_by_32_is_refused_by_name(tmp_path, name, content, sentence):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content())
    done = prepare("images", "--input", tmp_path / "in", "--out", tmp_path / "out", check=False)
    assert sentence in done.stderr
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "out").exists()


def test_an_archive_of_images_that_is_cut_is_refused_by_name(tmp_path):
    path = archived(tmp_path / "cifar-10-python.tar.gz", {"cifar/data_batch_1": as_pickles(some_images(20))})
    path.write_bytes(path.read_bytes()[:30_000])
    said = prepare("images", "--input", path, "--out", tmp_path / "out", check=False).stderr
    assert "is damaged or incomplete" in said


def test_flags_that_cannot_work_are_refused(tmp_path):
    def said(*flags):
        return prepare("images", "--input", tmp_path / "in", "--out", tmp_path / "out", *flags, check=False).stderr

    (tmp_path / "in" / "test").mkdir(parents=True)
    (tmp_path / "in" / "notes.txt").write_text("nothing")
    assert "holds no images" in said()
    assert "--input and --photographs exclude each other" in said("--photographs")
    assert "--valid-fraction must lie between 0 and 0.5, not 0.7" in said("--valid-fraction", "0.7")
    (tmp_path / "in" / "test" / "one.png").write_bytes(png(some_images(1)[0]))
    assert "--test-fraction has no meaning where --input has files for test" in said("--test-fraction", "0.1")
    (tmp_path / "in" / "one.png").write_bytes(png(some_images(1)[0]))
    assert "--input has no images for the split" in said()
    assert not (tmp_path / "out").exists()
    assert said("--dry-run") == ""
    assert not (tmp_path / "out").exists()
