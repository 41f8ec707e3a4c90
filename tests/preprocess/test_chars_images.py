"""Text as characters and bytes, images as colour values: nothing is lost, nothing unexpected is accepted."""

import argparse
import io
import json
import pickle
import random
import tarfile
import zipfile

import numpy as np
import pytest
from fairseq.data import Dictionary, indexed_dataset
from PIL import Image

from fairseq_ms_pipeline.images.cli import make_job
from fairseq_ms_pipeline.images.read import TOKENS, photographs, raster
from fairseq_ms_pipeline.images.stages import SHARD_IMAGES, run
from fairseq_ms_pipeline.text import byte_symbols, characters, undone
from tests.helpers.cli import ROOT, run_cli
from tests.preprocess.sample import prepare


def manifest_of(out):
    return json.loads((out / "manifest.json").read_text())


def read_back(out, split):
    dictionary = Dictionary.load(str(out / "bin" / "dict.txt"))
    return dictionary, indexed_dataset.make_dataset(str(out / "bin" / split), impl="mmap")


@pytest.mark.parametrize("unit", ["char", "byte"])
def test_wikitext_becomes_characters_and_back(tmp_path, unit):
    lines = [" ", " = Title = ", " ", " A <unk> 日本 name @-@ d ▁ é @@ </s> . "]
    text = "".join(line + "\n" for line in lines * 5)
    with zipfile.ZipFile(tmp_path / "wikitext-103-v1.zip", "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103/wiki.{split}.tokens", text)
    out = tmp_path / "out"
    prepare("chars", "--input", tmp_path / "wikitext-103-v1.zip", "--out", out, "--level", unit)
    kept = "".join(" ".join(line.split()).replace("▁", "_") + "\n" for line in lines * 5)
    assert (out / "text" / "test.txt").read_text() == kept
    dictionary, data = read_back(out, "test")
    symbols = [dictionary.string(data[i]) for i in range(len(data))]
    assert "".join(undone(line, unit) + "\n" for line in symbols) == kept
    counts = manifest_of(out)["splits"]["test"]
    assert counts["targets"] == (len(kept) if unit == "char" else len(kept.encode()))
    assert counts["characters"] == len(kept)
    assert counts["bytes"] == len(kept.encode())
    assert counts["unknown"] == 0


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


def image_job(tmp_path, *inputs, **flags):
    defaults = {"valid_fraction": None, "test_fraction": None, "seed": 1, "quiet": True, "photographs": False}
    given = {"input": list(inputs), "out": tmp_path / "out", "dry_run": False, **defaults, **flags}
    return make_job(argparse.Namespace(**given))


def decoded(out, split):
    """Colour values (B, 3072) by fairseq's own reading."""
    dictionary, data = read_back(out, split)
    values = np.array([int(symbol) if symbol.isdigit() else -1 for symbol in dictionary.symbols])
    return values[np.stack([data[i].numpy() for i in range(len(data))])]


def test_planes_become_raster_rgb():
    found = some_images(3)
    assert (raster(planes(found)) == found.reshape(3, -1)).all()


def test_imagenet32_npz_zips_keep_val_as_test_and_hold_out_valid(tmp_path):
    train, val = some_images(300, 1), some_images(40, 2)
    for name, parts in (("train", {f"train_data_batch_{n}": train[n * 100 - 100 : n * 100] for n in (1, 2, 3)}),
                        ("val", {"val_data": val})):  # fmt: skip
        with zipfile.ZipFile(tmp_path / f"Imagenet32_{name}_npz.zip", "w") as archive:
            for file, part in parts.items():
                content = io.BytesIO()
                np.savez(content, data=planes(part), labels=np.arange(len(part)), mean=np.zeros(TOKENS))
                archive.writestr(f"Imagenet32_{name}_npz/{file}.npz", content.getvalue())
    archives = [tmp_path / f"Imagenet32_{name}_npz.zip" for name in ("train", "val")]
    run(image_job(tmp_path, *archives, valid_fraction=0.2))
    assert (decoded(tmp_path / "out", "test") == val.reshape(40, -1)).all()
    drawn = [decoded(tmp_path / "out", split) for split in ("train", "valid")]
    assert 30 < len(drawn[1]) < 90
    assert sorted(map(bytes, np.concatenate(drawn).astype(np.uint8))) == sorted(map(bytes, train.reshape(300, -1)))


@pytest.mark.parametrize("layout", ["imagenet", "cifar-python", "cifar-binary"])
def test_pickled_and_binary_batches_are_read(tmp_path, layout):
    train, test = some_images(50, 1), some_images(20, 2)
    if layout == "imagenet":
        (tmp_path / "batches").mkdir()
        for name, part in (("train_data_batch_1", train), ("val_data", test)):
            batch = {"data": planes(part), "labels": [1] * len(part), "mean": np.zeros(TOKENS)}
            (tmp_path / "batches" / name).write_bytes(pickle.dumps(batch))
        source = tmp_path / "batches"
    else:
        source = tmp_path / "cifar-10.tar.gz"
        folder = "cifar-10-batches-py" if layout == "cifar-python" else "cifar-10-batches-bin"
        with tarfile.open(source, "w:gz") as tar:
            for name, part in (("data_batch_1", train), ("test_batch", test)):
                if layout == "cifar-python":
                    content = pickle.dumps({b"data": planes(part), b"labels": [0] * len(part)}, protocol=2)
                else:
                    name, content = f"{name}.bin", np.insert(planes(part), 0, 7, axis=1).tobytes()
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    manifest = run(image_job(tmp_path, source, valid_fraction=0.2))
    assert (decoded(tmp_path / "out", "test") == test.reshape(20, -1)).all()
    counts = manifest["splits"]
    assert counts["train"]["images"] + counts["valid"]["images"] == 50
    assert counts["test"]["targets"] == counts["test"]["bytes"] == 20 * 3072


def png(image_HWC, mode="RGB"):
    content = io.BytesIO()
    Image.fromarray(image_HWC).convert(mode).save(content, "png")
    return content.getvalue()


def test_folders_and_zips_of_png_are_read_and_named_splits_kept(tmp_path):
    found = some_images(60)
    with zipfile.ZipFile(tmp_path / "pictures.zip", "w") as archive:
        for index, image in enumerate(found):
            split = ("train", "valid", "test")[index % 3]
            archive.writestr(f"{split}/frog/{index:03d}.png", png(image))
    run(image_job(tmp_path, tmp_path / "pictures.zip"))
    for index, split in enumerate(("train", "valid", "test")):
        assert (decoded(tmp_path / "out", split) == found[index::3].reshape(20, -1)).all()


def test_an_image_is_one_block_of_fairseq_and_sees_nothing_of_the_one_before(tmp_path):
    from fairseq.data import TokenBlockDataset

    (tmp_path / "in").mkdir()
    for index, image in enumerate(some_images(40)):
        (tmp_path / "in" / f"{index:02d}.png").write_bytes(png(image))
    run(image_job(tmp_path, tmp_path / "in", valid_fraction=0.2, test_fraction=0.2))
    _, data = read_back(tmp_path / "out", "train")
    blocks = TokenBlockDataset(data, data.sizes, TOKENS, pad=1, eos=2, break_mode="none", include_targets=True)
    assert len(blocks) == len(data) > 10
    for index in range(len(data)):
        source, target, _ = blocks[index]
        assert (target == data[index]).all()
        assert source[0] == 2
        assert (source[1:] == data[index][:-1]).all()


def test_shards_do_not_change_what_is_read(tmp_path):
    found = some_images(SHARD_IMAGES + 700)
    (tmp_path / "in").mkdir()
    for index in range(3):
        part = found[index::3]
        np.savez(tmp_path / "in" / f"train_data_batch_{index}.npz", data=planes(part))
    manifest = run(image_job(tmp_path, tmp_path / "in", valid_fraction=0.01, test_fraction=0.01))
    assert sum(counts["images"] for counts in manifest["splits"].values()) == len(found)
    assert manifest["splits"]["train"]["images"] > SHARD_IMAGES
    joined = np.concatenate([decoded(tmp_path / "out", split) for split in manifest["splits"]])
    assert sorted(map(bytes, joined.astype(np.uint8))) == sorted(map(bytes, found.reshape(len(found), -1)))


def test_photographs_are_cut_into_crops_that_do_not_overlap():
    for _, crops in photographs():
        assert crops.shape == (13 * 20, TOKENS)
        assert crops.dtype == np.uint8
    from sklearn.datasets import load_sample_image

    first = next(iter(photographs()))[1]
    photo = load_sample_image("china.jpg")
    assert (first[21].reshape(32, 32, 3) == photo[32:64, 32:64]).all()


class Payload:
    """What a malicious pickle would hold."""

    def __reduce__(self):
        return (print, ("run",))


def npz(cut=None, **arrays):
    """A file as ImageNet-32's, perhaps without its end."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    return content.getvalue()[:cut]


def damaged_zip():
    """A zip of one image, in which a byte has changed."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("one.png", png(some_images(1)[0]))
    data = bytearray(content.getvalue())
    data[500] ^= 1
    return bytes(data)


def cut_tar():
    """The beginning of a compressed tar of batches."""
    content, batch = io.BytesIO(), pickle.dumps({"data": planes(some_images(20))})
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.size = len(batch)
        tar.addfile(member, io.BytesIO(batch))
    return content.getvalue()[:30_000]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("val_data.npz", lambda: npz(-30, data=np.ones((4, TOKENS), np.uint8)), "val_data.npz is no npz file"),
        ("val_data.npz", lambda: npz(data=np.array([Payload()], object)), "is no npz file with an array 'data'"),
        ("val_data.npz", lambda: npz(other=np.zeros(3)), "is no npz file with an array 'data'"),
        ("pictures.zip", damaged_zip, "one.png is damaged or incomplete"),
        ("cifar-10-python.tar.gz", cut_tar, "is damaged or incomplete"),
        ("small.png", lambda: png(some_images(1)[0][:28]), r"small\.png must be 32 x 32 in RGB, but is 32 x 28 in RGB"),
        ("grey.png", lambda: png(some_images(1)[0], "L"), "grey.png must be 32 x 32 in RGB, but is 32 x 32 in L"),
        ("clear.png", lambda: png(some_images(1)[0], "RGBA"), "in RGBA"),
        ("text.png", lambda: b"no image", "text.png is no readable image"),
        ("cut.png", lambda: png(some_images(1)[0])[:900], "cut.png is no readable image"),
        ("val_data", lambda: pickle.dumps({"data": Payload()}), "holds builtins.print, which is no array"),
        ("val_data", lambda: pickle.dumps({"data": np.zeros((2, 3000), np.uint8)}), "of shape .*, but is uint8 of"),
        ("val_data", lambda: pickle.dumps({"data": np.zeros((2, 3072), np.int64)}), "but is int64 of"),
        ("val_data", lambda: pickle.dumps({"other": 1}), "but is None of None"),
        ("data_batch_1.bin", lambda: b"x" * 3074, "3,074 bytes are no whole number"),
    ],
)
def test_what_is_no_image_of_32_by_32_is_refused_by_name(tmp_path, capsys, name, content, sentence):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content())
    with pytest.raises(ValueError, match=sentence):
        run(image_job(tmp_path, tmp_path / "in"))
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().out == ""


def test_flags_that_cannot_work_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("nothing")
    with pytest.raises(ValueError, match="holds no images"):
        image_job(tmp_path, tmp_path / "in")
    with pytest.raises(ValueError, match="--input and --photographs exclude each other"):
        image_job(tmp_path, tmp_path / "in", photographs=True)
    with pytest.raises(ValueError, match=r"--valid-fraction must lie between 0 and 0.5, not 0.7"):
        image_job(tmp_path, tmp_path / "in", valid_fraction=0.7)
    (tmp_path / "in" / "test").mkdir()
    (tmp_path / "in" / "test" / "one.png").write_bytes(png(some_images(1)[0]))
    with pytest.raises(ValueError, match="--test-fraction has no meaning where --input has files for test"):
        image_job(tmp_path, tmp_path / "in", test_fraction=0.1)
    (tmp_path / "in" / "one.png").write_bytes(png(some_images(1)[0]))
    with pytest.raises(ValueError, match="--input has no images for the split"):
        run(image_job(tmp_path, tmp_path / "in"))


def test_the_script_prepares_the_photographs(tmp_path):
    script = ROOT / "preprocess" / "images" / "prepare.py"
    done = run_cli("python", script, "--photographs", "--out", tmp_path / "out")
    assert sum(counts["images"] for counts in manifest_of(tmp_path / "out")["splits"].values()) == 520
    assert "Images in" in done.stdout
    assert "DEBUG" not in done.stderr
