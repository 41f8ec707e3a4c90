"""A whole path without fairseq: prepare, train in a plain loop, and its one file in every command that takes it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from fairseq_ms import cli, core
from fairseq_ms.commands import perplexity
from fairseq_ms.tools import loading, plain, tokenizing
from tests.helpers.beside import library
from tests.helpers.cli import ROOT, run_cli
from tests.helpers.faults import cut, flip_weight
from tests.helpers.trained import NARROW, TINY, random_lines, write_checkpoint, write_corpus

TRAIN = ROOT / "user_dir_examples" / "plain_pytorch" / "train.py"
# In one process, which loads torch once.
WALK = """
import json, runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fairseq", "fairseq_cli", "omegaconf", "hydra"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from fairseq_ms.cli import main

for command in json.loads(sys.argv[1]):
    print("$", *command, flush=True)
    if command[0].endswith(".py"):
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
    elif code := main(command):
        sys.exit(code)
sys.argv = ["transformers"]
from transformers import AutoModelForCausalLM, AutoTokenizer

read = AutoTokenizer.from_pretrained("out", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True)
tokens = read(["def f"], return_tensors="pt")
print("$ transformers", read.decode(model.generate(**tokens, max_new_tokens=30, do_sample=False)[0, 1:]), sep="\\n")
assert not {"fairseq", "omegaconf", "hydra"} & set(sys.modules)
"""
SMALL = ["--set", "dim=24", "ffn_dim=40", "heads=3", "layers=1", "positions='rotary'".replace("'", '"')]
SMALL += ["--rows", "4", "--length", "24", "--steps", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--bpe", "hf_byte_bpe", "--bpe-merges", "20"], ["--level", "word"], None])
def test_data_are_prepared_a_model_trained_scored_sampled_and_exported(flags: list[str] | None, tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        (tmp_path / "texts" / name / "a.txt").write_text(f"def {name}(x):\n    return x\n\n\n" * 40)
    (tmp_path / "book.txt").write_text("def f(x):\n    return x + 1\n" * 90)
    prepare = ["prepare", "text", "--input", "texts", "--out", "data", "--workers", "1", "--quiet"]
    commands = [[*prepare, *flags]] if flags else []
    file = "runs/plain/checkpoint.pt"
    commands += [
        [str(TRAIN), "data/bin/train" if flags else "book.txt", *SMALL],
        ["perplexity", file, "--json", "numbers.json", "--cpu"],
        ["perplexity", file, "--data", "book.txt", "--json", "of_text.json", "--cpu"],
        ["sample", file, "--prompt", "def f", "--max-len-b", "30", "--temperature", "0", "--cpu"],
        ["export", file, "out"],
        ["sample", "out", "--prompt", "def f", "--max-len-b", "30", "--temperature", "0", "--cpu"],
    ]
    env = {"PYTHONPATH": str(library("transformers-5", tmp_path)), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = run_cli("python", "-c", WALK, json.dumps(commands), cwd=tmp_path, env=env)
    *_, sampled, _, again, _ = done.stdout.split("$ ")
    assert sampled.partition("\n")[2] == again.partition("\n")[2]
    numbers, of_text = (json.loads((tmp_path / name).read_text()) for name in ("numbers.json", "of_text.json"))
    assert numbers["perplexity"] > 1
    assert of_text["source_bytes"] == 90 * 27
    if flags is None or "--bpe" in flags:
        assert done.stdout.rpartition("$ transformers\n")[2].strip() in sampled


def in_one_file(checkpoint: Path, data: Path, file: Path) -> Path:
    """A checkpoint of fairseq's as a plain loop writes it."""
    found = loading.load(str(checkpoint), cpu=True)
    kept = {"tokenizer": tokenizing.kept(data), "data": str(data), "length": found.segment, "held_out": 0}
    described = {"name": type(found.core).__name__, "configuration": found.core.config.to_dict()}
    torch.save({"model": found.core.state_dict(), **described, **kept}, file)
    return file


@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        ("vanilla_lm", ["--adaptive-softmax-cutoff", "9,15"]),
        ("retina_lm", ["--scale-windows", "1x=0:4,4x=4:28", "--positions", "rotary"]),
        ("transformer_xl", ["--mem-len", "7"]),
    ],
)
@pytest.mark.parametrize("asked", [{}, {"mode": "eos"}, {"segment": 5}])
def test_a_file_has_the_numbers_of_fairseqs_checkpoint_bit_for_bit(
    arch: str, flags: list[str], asked: dict[str, Any], tmp_path: Path
) -> None:
    data = write_corpus(tmp_path / "bin", {"train": random_lines(1, 40), "test": random_lines(2, 11)})
    task = "streaming_language_modeling" if arch == "transformer_xl" else "language_modeling"
    sizes = [*(NARROW if "--scale-layers" in flags else TINY), "--tokens-per-sample", "26", "--init-std", "0.3"]
    path = write_checkpoint(tmp_path / "model.pt", data, arch, *sizes, *flags, task=task)
    file = in_one_file(path, data, tmp_path / "plain.pt")
    ours, theirs = (perplexity.load(str(model), cpu=True, **asked) for model in (file, path))
    window = asked.get("segment") if arch != "transformer_xl" else None
    assert isinstance(ours, plain.Plain)
    assert perplexity.evaluate(ours, "test", window) == perplexity.evaluate(theirs, "test", window)


def tiny_file(folder: Path) -> Path:
    """What a plain loop would have written of a text."""
    (folder / "text.txt").write_text("the cat sat\n" * 9)
    model = core.Vanilla(core.VanillaConfig(vocab_size=260, dim=12, ffn_dim=12, heads=2, layers=1, positions="rotary"))
    about = {"name": "Vanilla", "configuration": model.config.to_dict(), "data": str(folder / "text.txt")}
    about |= {"tokenizer": tokenizing.kept(folder / "text.txt"), "length": 8, "held_out": 24}
    torch.save({"model": model.state_dict(), **about}, folder / "plain.pt")
    return folder / "plain.pt"


def changed(**others: Any) -> Callable[[Path], None]:
    """What a file holds, with some of it replaced."""

    def change(file: Path) -> None:
        state = torch.load(file, weights_only=True)
        torch.save({**state, **{name: new(state[name]) for name, new in others.items()}}, file)

    return change


def nan_among(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights["stack.layers.0.ffn.down.weight"][3, 5] = torch.nan
    return weights


NOT_AS_WRITTEN = "CHECKPOINT must be as plain_pytorch/train.py writes it"
WRONG_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (lambda file: flip_weight(file, Random(1)), "is damaged (the checksum of"),
    "cut": (lambda file: cut(file, Random(1)), "is damaged (its "),
    "not a number": (changed(model=nan_among), "must have finite weights: "),
    "too few symbols": (changed(tokenizer=lambda own: {**own, "symbols": own["symbols"][:-1]}), NOT_AS_WRITTEN),
    "symbols without names": (changed(tokenizer=lambda own: {**own, "symbols": 260 * [0]}), NOT_AS_WRITTEN),
    "files without names": (changed(tokenizer=lambda own: {**own, "files": ["a"]}), NOT_AS_WRITTEN),
    "no length": (changed(length=str), NOT_AS_WRITTEN),
    "no data": (changed(data=lambda data: 3), NOT_AS_WRITTEN),
}


@pytest.mark.parametrize("wrong", WRONG_FILES)
@pytest.mark.parametrize("command", ["perplexity", "sample", "export"])
def test_a_file_that_is_damaged_or_not_as_written_is_one_sentence(
    command: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tiny_file(tmp_path), tmp_path / "out"
    damage, sentence = WRONG_FILES[wrong]
    damage(file)
    given = {"perplexity": ["--cpu"], "sample": ["--prompt", "the", "--cpu"], "export": [str(out)]}
    assert cli.main([command, str(file), *given[command]]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert sentence in printed.err
    assert not out.exists()


def test_perplexity_of_a_file_whose_numbers_overflow_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny_file(tmp_path)
    assert cli.main(["perplexity", str(file), "--cpu"]) == 0
    changed(model=lambda weights: {**weights, "stack.norm.weight": torch.full((12,), 3e38)})(file)
    assert cli.main(["perplexity", str(file), "--cpu"]) == 2
    assert "logits must be finite" in capsys.readouterr().err


def test_what_a_file_cannot_be_asked_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_corpus(tmp_path / "bin", {"train": random_lines(1, 40), "test": random_lines(2, 11)})
    other = write_corpus(tmp_path / "other", {"test": random_lines(2, 11), "train": random_lines(1, 9, words=9)})
    path = write_checkpoint(tmp_path / "model.pt", data, "vanilla_lm", *TINY, "--tokens-per-sample", "26")
    file = str(in_one_file(path, data, tmp_path / "plain.pt"))
    state = torch.load(file, weights_only=True)
    torch.save({**state, "configuration": {}}, tmp_path / "broken.pt")
    torch.save({**state, "name": "CoarseLM"}, tmp_path / "coarse.pt")
    (tmp_path / "latin.txt").write_bytes(b"\xe9\n")
    for command, named in (
        (["perplexity", file, "--data", str(other)], "--data"),
        (["perplexity", file, "--data", "nowhere"], "--data"),
        (["perplexity", file, "--gen-subset", "dev"], "--gen-subset"),
        (["perplexity", file, "--data", str(tmp_path / "latin.txt")], "--level"),
        (["sample", file, "--prompt", "a"], "manifest.json"),
        (["perplexity", str(tmp_path / "broken.pt")], "CHECKPOINT"),
        (["perplexity", str(tmp_path / "coarse.pt")], "CHECKPOINT"),
    ):
        assert cli.main([*command, "--cpu"]) == 2, command
        said = capsys.readouterr().err
        assert named in said, said
        assert said.count("\n") == 1, said
    assert cli.main(["perplexity", str(tiny_file(tmp_path)), "--data", str(tmp_path / "latin.txt")]) == 2
    assert "UTF-8" in capsys.readouterr().err


WITHOUT = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in json.loads(sys.argv[1]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from fairseq_ms.cli import main

for command in json.loads(sys.argv[2]):
    print("$", main(command), flush=True)
    print("$", file=sys.stderr, flush=True)
"""
OF_FAIRSEQ = ["fairseq", "fairseq_cli", "omegaconf", "hydra"]


def answers(absent: list[str], commands: list[list[str]], folder: Path) -> list[tuple[int, str, str]]:
    """What each command answers where some packages are not installed: its code, and what it prints on both ways."""
    done = run_cli("python", "-c", WITHOUT, json.dumps(absent), json.dumps(commands), cwd=folder)
    codes = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("$ ")]
    return list(zip(codes, re.split(r"\$ \d+\n", done.stdout), done.stderr.split("$\n"), strict=False))


def test_a_command_that_needs_fairseq_says_so_in_one_sentence_and_how_to_get_it(tmp_path: Path) -> None:
    write_corpus(tmp_path / "bin", {"train": random_lines(1, 40), "valid": random_lines(2, 4)})
    checkpoint = tmp_path / "model.pt"
    write_checkpoint(checkpoint, tmp_path / "bin", "vanilla_lm", *TINY, "--tokens-per-sample", "26")
    commands = [
        "train retina_lm_long_2048 --data bin --max-update 3",
        "config --flags retina_lm",
        "memory --arch retina_lm",
        "lm-eval run --model fairseq_ms",
        "perplexity model.pt",
        "sample model.pt --prompt a",
        "export model.pt out",
        "context-window model.pt",
        "context-length --arch transformer_ql",
        "context-shuffle model.pt",
        "nll-by-frequency model.pt",
        "plot attention model.pt",
        "neighbors model.pt",
        "recall model.pt",
    ]
    found = answers([*OF_FAIRSEQ, "yaml"], [command.split() for command in commands], tmp_path)
    assert len(found) == len(commands)
    for command, (code, out, err) in zip(commands, found, strict=True):
        assert (code, out, err.count("\n")) == (2, "", 1), (command, err)
        assert " needs fairseq, which is missing; run: pip install " in err, (command, err)


def test_files_of_presets_need_pyyaml_at_most(tmp_path: Path) -> None:
    write_corpus(tmp_path / "bin", {"train": random_lines(1, 40), "valid": random_lines(2, 4)})
    commands = [["config", "retina_lm_long_2048", "--data", "bin"], ["config", "--list"]]
    (code, out, _), (listed, _, _) = answers(OF_FAIRSEQ, commands, tmp_path)
    assert (code, listed) == (0, 0)
    assert "scale_windows" in out
    (code, out, err), (listed, _, _) = answers([*OF_FAIRSEQ, "yaml"], commands, tmp_path)
    assert (code, out, listed) == (2, "", 0)
    assert "pip install pyyaml" in err


def test_a_model_of_bytes_needs_no_tokenizers(tmp_path: Path) -> None:
    tiny_file(tmp_path)
    (tmp_path / "odd.txt").write_text("naïve – 東京\n  a\tb\n\n")
    commands = [
        ["perplexity", "plain.pt", "--cpu", "--json", "with.json", "--data", "odd.txt"],
        ["sample", "plain.pt", "--prompt", "naïve 東", "--max-len-b", "30", "--seed", "1", "--cpu"],
    ]
    found = answers([*OF_FAIRSEQ, "tokenizers"], commands, tmp_path)
    assert [code for code, _, _ in found] == [0, 0], found
    assert found[1][1].startswith("naïve 東")


def test_bytes_are_numbered_as_byte_level_bpe_does_that_has_learnt_nothing(tmp_path: Path) -> None:
    from fairseq_ms_pipeline.byte_bpe import ByteSubwords
    from fairseq_ms_pipeline.plain_bytes import Bytes

    (tmp_path / "text.txt").write_text("a\n")
    for name, text in tokenizing.kept(tmp_path / "text.txt")["files"].items():
        (tmp_path / name).write_text(text)
    ours, theirs = Bytes(), ByteSubwords()
    ours.codes_file = theirs.codes_file = tmp_path / "merges.txt"
    for text in ("naïve – 東京 😀", "  a\tb\x00\x7f\xad", ""):
        symbols = theirs.symbols_of(f"{text}\n{text}")
        assert ours.symbols_of(f"{text}\n{text}") == symbols
        assert ours.text_of(symbols) == theirs.text_of(symbols) == f"{text}\n{text}"
    assert ours.text_of(["239", "191"]) == "\ufffd"
