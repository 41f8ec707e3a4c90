"""``fairseq-ms sample``: what it prints is the prompt, and what the model draws after it, as text."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from fairseq_ms import cli
from fairseq_ms.commands.sample import Page
from fairseq_ms.tools import checkpoints, tokenizing
from tests.export.cases import CASES
from tests.helpers.beside import library
from tests.helpers.trained import NARROW, make_unigram, write_checkpoint

TEXT = """He said: "it's done", didn't he?
The cats' tails (all 3 of them) cost $5.50 - naïve, isn't it?

    for x in y:  # 東京 😀
\treturn "a" + 'b'
No one knew ... why.
"""
LEVELS = {
    "word": ["text", "--level", "word"],
    "bpe": ["text", "--bpe-merges", "30"],
    "hf_byte_bpe": ["text", "--bpe", "hf_byte_bpe", "--bpe-merges", "30"],
    "char": ["chars", "--level", "char"],
    "byte": ["chars", "--level", "byte"],
}
KINDS = {
    "haed": [*CASES["haed"][2:], "--separators", "a"],
    "hred": CASES["hred"][2:],
    "multiscale_topdown": CASES["topdown"][2:],
    "transformer_ql": CASES["transformer_ql"][2:],
}
ANY = ("--sampling-topk", 0, "--temperature", 3)
ROTARY = [*NARROW, "--decoder-layers", "1", "--init-std", "0.4", "--positions", "rotary"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every level a folder with data, their manifest, and a model of random weights."""
    folder = tmp_path_factory.mktemp("samples")
    for split in ("train", "valid", "test"):
        (folder / "texts" / split).mkdir(parents=True)
        (folder / "texts" / split / "a.txt").write_text(TEXT * 3)
    for number, (level, (dataset, *flags)) in enumerate(LEVELS.items()):
        given = ["--input", str(folder / "texts"), "--out", str(folder / level), "--workers", "1", "--quiet"]
        assert cli.main(["prepare", dataset, *given, *flags]) == 0
        torch.manual_seed(number)
        write_checkpoint(folder / level / "model.pt", folder / level / "bin", "vanilla_lm", *ROTARY)
    write_checkpoint(
        folder / "learned.pt", folder / "bpe" / "bin", "vanilla_lm", *ROTARY[:-2], "--tokens-per-sample=30"
    )
    return folder


class Writes(io.StringIO):
    """Standard output that remembers its pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def sampled(*arguments: object, prompt: str = "", monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is printed, in the pieces in which it is."""
    out, read = Writes(), io.TextIOWrapper(io.BytesIO(prompt.encode()))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stdin", read)
        assert cli.main(["sample", *map(str, arguments), "--cpu"]) == 0
    return out.pieces


def drawn(path: Path, prompt: str, count: int, seed: int) -> tuple[tokenizing.Symbols, list[int]]:
    """The tokens of the prompt and after it, drawn without a command."""
    checkpoint = checkpoints.load(str(path), cpu=True)
    lines = tokenizing.lines_of(tokenizing.pipeline_of(checkpoint.folder, None, None, None, None))
    symbols = tokenizing.Symbols(lines, checkpoint.dictionary.symbols)
    tokens = torch.tensor([checkpoint.dictionary.eos(), *symbols.tokens_of(prompt)])
    allowed = torch.ones(len(checkpoint.dictionary), dtype=torch.bool)
    allowed[[checkpoint.dictionary.pad(), checkpoint.dictionary.bos()]] = False
    generator = torch.Generator().manual_seed(seed)
    found = checkpoint.model.decoder.core.generate(tokens, count, 3.0, generator=generator, allowed=allowed)
    return symbols, found[1:].tolist()


@pytest.mark.parametrize("level", LEVELS)
def test_it_prints_the_prompt_and_the_tokens_after_it_over_ends_of_lines_as_they_come(
    level: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "No one knew\nThe cats"
    symbols, tokens = drawn(place / level / "model.pt", prompt, 400, 7)
    assert 2 in tokens[len(symbols.tokens_of(prompt)) :], "ends of lines"
    flags = ("--max-len-b", 400, "--seed", 7, *ANY)
    pieces = sampled(place / level / "model.pt", *flags, prompt=prompt + "\n", monkeypatch=monkeypatch)
    assert "".join(pieces) == symbols.text_of(tokens) + "\n"
    assert len(pieces) > 10, "in pieces"
    assert sampled(place / level / "model.pt", *flags, "--prompt", prompt, monkeypatch=monkeypatch) == pieces


@pytest.mark.parametrize("given", ["--prompt-file", "stdin", "--prompt"])
def test_a_prompt_keeps_the_carriage_returns_that_prepared_data_keep(
    given: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "No one\r\nknew\r"
    (tmp_path / "prompt.txt").write_bytes(prompt.encode() + b"\n")
    named = {"--prompt-file": ("--prompt-file", tmp_path / "prompt.txt"), "--prompt": ("--prompt", prompt)}
    flags = ("--max-len-b", 1, *named.get(given, ()))
    pieces = sampled(place / "hf_byte_bpe" / "model.pt", *flags, prompt=prompt + "\n", monkeypatch=monkeypatch)
    assert "".join(pieces).startswith(prompt)


@pytest.mark.parametrize("flag", ["--prompt", "--stop"])
def test_a_text_on_the_command_line_that_is_not_utf_8_is_one_sentence(
    flag: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--prompt", "a", flag, os.fsdecode(b"caf\xe9")]
    assert cli.main(["sample", str(place / "hf_byte_bpe" / "model.pt"), *given]) == 2
    assert f"{flag} must be UTF-8: it is not (byte 3)" in capsys.readouterr().err


@pytest.mark.parametrize("level", LEVELS)
def test_an_exported_model_writes_what_its_checkpoint_does(
    level: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = str(library("transformers-5", tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, beside])
    assert cli.main(["export", str(place / level / "model.pt"), str(tmp_path / "out")]) == 0
    flags = ("--max-len-b", 50, "--seed", 3, "--prompt", "No one\nthe cats'")
    expected = sampled(place / level / "model.pt", *flags, monkeypatch=monkeypatch)
    assert sampled(tmp_path / "out", *flags, monkeypatch=monkeypatch) == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("begun", [0, 9])
def test_what_is_printed_early_is_what_the_whole_text_has(
    level: str, begun: int, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quotes, brackets, contractions and characters of several bytes."""
    pipeline = tokenizing.pipeline_of(place / level / "bin", None, None, None, None)
    every = (place / level / "bin" / "dict.txt").read_text().split("\n")
    symbols = tokenizing.Symbols(
        tokenizing.lines_of(pipeline), ["<s>", "<pad>", "</s>", "<unk>", *(line.rpartition(" ")[0] for line in every)]
    )
    tokens = symbols.tokens_of(TEXT)
    page = Page(symbols.text_of, 2, (), 2 if level in ("word", "bpe") else 0, tokens[:begun])
    for token in tokens[begun:]:
        page.add(token)
        page.show()
    page.show(whole=True)
    assert capsys.readouterr().out == symbols.text_of(tokens)


@pytest.mark.parametrize("stop", ["e", "he", "\n", "e\n", "knew"])
def test_it_ends_in_front_of_a_stop_string_that_the_prompt_may_have(
    stop: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "No one knew\n"
    symbols, tokens = drawn(place / "hf_byte_bpe" / "model.pt", prompt, 400, 5)
    whole = symbols.text_of(tokens)
    found = whole.find(stop, len(prompt))
    flags = ("--max-len-b", 400, "--seed", 5, *ANY, "--prompt", prompt, "--stop", "unheard of", "--stop", stop)
    pieces = sampled(place / "hf_byte_bpe" / "model.pt", *flags, monkeypatch=monkeypatch)
    assert "".join(pieces) == (whole[:found] if found >= 0 else whole) + "\n"


def test_the_most_probable_tokens_are_always_the_same_and_seeds_are_not(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def three(*flags: object) -> set[str]:
        given = (place / "char" / "model.pt", "--prompt", "a", "--max-len-b", 40, *flags)
        return {"".join(sampled(*given, monkeypatch=monkeypatch)) for _ in range(3)}

    assert len(three("--temperature", 0)) == len(three("--seed", 4)) == 1
    assert len(three()) == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("bpe/model.pt --prompt a --temperature -1", "--temperature"),
        ("bpe/model.pt --prompt a --sampling-topp 0", "--sampling-topp"),
        ("bpe/model.pt --prompt a --stop=", "--stop"),
        ("bpe/model.pt --prompt-file nowhere.txt", "nowhere.txt"),
        ("bpe/model.pt --prompt-file bpe/model.pt", "UTF-8"),
        ("bpe --prompt a", "bpe/model.pt"),
        ("bpe/model.pt --prompt a --data bpe", "did you mean bpe/bin?"),
        ("texts --prompt a", "CHECKPOINT"),
        ("gone.pt --prompt a", "--data"),
        ("learned.pt --prompt a --max-len-b 31", "--max-len-b"),
        ("broken --prompt a", "CHECKPOINT"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(
    arguments: str, named: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    state = torch.load("bpe/model.pt", weights_only=True)
    state["cfg"]["task"]["data"] = "gone/bin"
    torch.save(state, "gone.pt")
    Path("broken").mkdir(exist_ok=True)
    Path("broken/config.json").write_text(json.dumps({"architectures": ["VanillaForCausalLM"], "model": {}}))
    assert cli.main(["sample", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert named in printed.err


def test_symbols_that_an_exported_tokenizer_has_not_are_not_drawn(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folders / "word", tmp_path / "out")
    words = json.loads((tmp_path / "out" / "vocab.json").read_text())[:7]
    (tmp_path / "out" / "vocab.json").write_text(json.dumps(words))
    written = "".join(sampled(tmp_path / "out", "--prompt", words[4], "--max-len-b", 40, *ANY, monkeypatch=monkeypatch))
    assert {*written} <= {*"".join(words), " ", "\n"}


def test_numbers_for_which_a_tokenizer_has_no_token_are_not_drawn(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an imported model has more rows than its tokenizer has tokens, here the most probable ones."""
    letters = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 4}, []))
    letters.decoder = decoders.Fuse()
    letters.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "manifest.json").write_text(json.dumps({"settings": {"level": "hf_tokenizer"}}))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dict.txt").write_text("".join(f"{number} 0\n" for number in range(7)))
    scores = torch.tensor([9.0, 9, -9, -9, -9, 5, 9, 9, -9, 9, 9])
    change = partial(make_unigram, log_probs_V=scores)
    path = write_checkpoint(tmp_path / "model.pt", tmp_path / "bin", "vanilla_lm", *ROTARY, change=change)
    flags = ("--prompt", "ac", "--max-len-b", 3, "--temperature", 0)
    assert "".join(sampled(path, *flags, monkeypatch=monkeypatch)) == "acbbb\n"
    assert cli.main(["export", str(path), str(tmp_path / "out")]) == 0
    assert "".join(sampled(tmp_path / "out", *flags, monkeypatch=monkeypatch)) == "acbbb\n"
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["suppress_tokens"] == [0, 1, 6, 7, 9, 10]


@pytest.fixture(scope="module")
def folders(place: Path) -> Path:
    """Exported models with and without a tokenizer.json."""
    for level in ("hf_byte_bpe", "word"):
        assert cli.main(["export", str(place / level / "model.pt"), str(place / "exported" / level)]) == 0
    return place / "exported"


def config_with(**changes: object) -> Callable[[Path], object]:
    """Another config.json, without what is None."""

    def change(folder: Path) -> None:
        found = {**json.loads((folder / "config.json").read_text()), **changes}
        (folder / "config.json").write_text(
            json.dumps({name: found[name] for name in found if found[name] is not None})
        )

    return change


def unlike(file: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(content)


BYTES = {"level": "hf_byte_bpe", "tokenise": "none", "language": "en", "blank_lines": "keep"}
BROKEN: dict[str, Callable[[Path], object]] = {
    "no dtype": config_with(dtype=None),
    "dtype load": config_with(dtype="load"),
    "dtype int8": config_with(dtype="int8"),
    "no pipeline": config_with(pipeline=None),
    "more in the pipeline": config_with(pipeline={**BYTES, "codes_file": "/etc/passwd"}),
    "no text in the pipeline": config_with(pipeline={**BYTES, "language": 3}),
    "less in the pipeline": config_with(pipeline={"level": "hf_byte_bpe"}),
    "a pipeline that is none": config_with(pipeline=["level"]),
    "no first symbol": config_with(bos_token_id=None, begin_token_id=None),
    "a first symbol that is none": config_with(begin_token_id="</s>"),
    "a first symbol of another model": config_with(begin_token_id=4000),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "an empty tokenizer": unlike("tokenizer.json", "{}"),
    "half a tokenizer": lambda folder: unlike("tokenizer.json", (folder / "tokenizer.json").read_text()[:999])(folder),
    "deep brackets": unlike("config.json", "[" * 100_000),
    "no configuration": unlike("config.json", "3"),
}
BROKEN_WORDS: dict[str, Callable[[Path], object]] = {
    "no words": lambda folder: (folder / "vocab.json").unlink(),
    "words that are none": unlike("vocab.json", "[3]"),
    "a word": unlike("vocab.json", '"word"'),
    "deep words": unlike("vocab.json", "[" * 100_000),
    "another encoding": lambda folder: (folder / "vocab.json").write_bytes(b'["\xe9"]'),
    "more words": unlike("vocab.json", json.dumps(["<s>", "<pad>", "</s>", "<unk>", *map(str, range(4000))])),
}


@pytest.mark.parametrize(
    ("level", "how"), [*(("hf_byte_bpe", how) for how in BROKEN), *(("word", how) for how in BROKEN_WORDS)]
)
def test_an_exported_folder_that_is_not_as_it_was_written_is_one_sentence(
    level: str, how: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders / level, tmp_path / "out")
    {**BROKEN, **BROKEN_WORDS}[how](tmp_path / "out")
    (tmp_path / "text.txt").write_text(TEXT)
    for command in (["sample", "--prompt", "a"], ["perplexity", "--data", str(tmp_path / "text.txt")]):
        assert cli.main([command[0], str(tmp_path / "out"), *command[1:], "--cpu"]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert "CHECKPOINT must be as fairseq-ms export writes a folder" in printed.err


@pytest.mark.parametrize("arch", KINDS)
def test_models_of_every_kind_write(arch: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = "streaming_language_modeling" if arch == "transformer_ql" else "language_modeling"
    torch.manual_seed(1)
    path = write_checkpoint(tmp_path / "model.pt", place / "char" / "bin", arch, *KINDS[arch], task=task)
    text = "".join(sampled(path, "--prompt", "No one", "--max-len-b", 20, *ANY, monkeypatch=monkeypatch))
    assert text.startswith("No one")
    assert len(text) > 12


def test_a_model_with_learned_positions_writes_as_much_as_it_has_room_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = sampled(place / "learned.pt", "--prompt", "No one", monkeypatch=monkeypatch)
    assert "".join(pieces).startswith("No one")
    longest = sampled(place / "learned.pt", "--prompt", "", "--max-len-b", 30, "--seed", 1, monkeypatch=monkeypatch)
    assert "".join(longest)
