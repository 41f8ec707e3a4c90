"""A prompt becomes the symbols that its text has in the prepared data, whatever flags are given or forgotten."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import json
import re
import shlex
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from fairseq import options
from fairseq.data import Dictionary, encoders
from fairseq.data.indexed_dataset import make_dataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import MODEL_REGISTRY

from fairseq_ms import cli
from fairseq_ms.errors import UsageError
from fairseq_ms.host import prompts
from fairseq_ms.host.interactive import Numbered
from tests.helpers import trained
from tests.helpers.beside import library
from tests.helpers.cli import ROOT, USER_DIR
from tests.helpers.forked import run

PLAIN = (
    "The baker's son said: \"it's done\" & <b>[x|y]</b>, didn't he? 5 < 6 > 4, a well-known `fact'... &apos;\r\n"
    "\tFaçade, naïve,  Ærø, Ho\u0308he; 東京 😀 👩\u200d🚀 — “so” … ¿qué?\u00a0\u2028x\r\n"
    "The old man.\r\n"
)
# What fairseq's own encoders take otherwise.
ODD = "an <unk> and </s>, @@ and word@@ ▁ @-@ \x1b\r\n"
PIPELINES = {
    "words": ("text", "--level", "word"),
    "white space": ("text", "--level", "word", "--tokenise", "none"),
    "bpe": ("text", "--bpe-merges", "30"),
    "bpe of white space": ("text", "--bpe-merges", "30", "--tokenise", "none"),
    "bpe of German": ("text", "--bpe-merges", "30", "--language", "de"),
    "hf_byte_bpe": ("text", "--bpe", "hf_byte_bpe", "--bpe-merges", "30"),
    "char": ("chars",),
    "byte": ("chars", "--level", "byte"),
}
# Of these, fairseq has encoders.
WITH_FLAGS = [name for name in PIPELINES if name not in ("white space", "char", "byte")]


def shown() -> dict[str, dict[str, list[Any]]]:
    """The arguments of each fairseq-interactive, and the settings of each from_pretrained, on pages and in examples."""
    found: dict[str, dict[str, list[Any]]] = {"interactive": {}, "hub": {}}
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "user_dir_examples").rglob("*.*")]:
        if path.suffix not in (".md", ".py", ".ipynb", ".sh"):
            continue
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        shell = re.findall(r"fairseq-interactive (data/.*)", text.replace("\\\n", ""))
        commands = [shlex.split(line)[1:] for line in shell]
        calls = re.findall(r"LanguageModel\.from_pretrained(\(.*?\))$", text, re.DOTALL | re.MULTILINE)
        settings = [{word.arg: ast.unparse(word.value) for word in _call(given).keywords} for given in calls]
        found["interactive"][name], found["hub"][name] = commands, settings
    return {kind: {name: uses for name, uses in by_page.items() if uses} for kind, by_page in found.items()}


def _call(given: str) -> ast.Call:
    call = ast.parse(f"f{given}", mode="eval").body
    assert isinstance(call, ast.Call)
    return call


SHOWN = shown()


@pytest.fixture(scope="module")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function: the folder that a pipeline has prepared of the text, and the last line but one that it printed."""
    folder = tmp_path_factory.mktemp("prompts")
    for split in ("train", "valid", "test"):
        (folder / "texts").mkdir(exist_ok=True)
        (folder / "texts" / f"{split}.txt").write_bytes(f"\ufeff{PLAIN}{ODD}".encode())

    @functools.cache
    def prepared(name: str) -> tuple[Path, str]:
        out, printed = folder / name / "mine", io.StringIO()
        flags = ["--input", str(folder / "texts"), "--out", str(out), "--workers", "1", "--quiet"]
        with redirect_stdout(printed):
            assert cli.main(["prepare", *PIPELINES[name], *flags]) == 0
        return out, printed.getvalue().splitlines()[-2]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(library("transformers-5", folder))
        yield prepared


def symbols(data: Path) -> list[list[int]]:
    """What the data has of each line, its end included."""
    lines = make_dataset(str(data / "train"), impl="mmap")
    return [lines[index].tolist() for index in range(len(lines))]


def read(data: Path, flags: list[str], text: str) -> list[list[int]]:
    """What fairseq-interactive makes of each line of a text."""
    source = data.parent / "prompts"
    source.write_bytes(text.encode())
    parser = options.get_interactive_generation_parser("language_modeling")
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, [str(data), "--path", "none", *flags]))
    prompts.as_prepared(lambda *_: None, None, cfg)
    steps = [encoders.build_tokenizer(cfg.tokenizer), encoders.build_bpe(cfg.bpe)]
    lines = list(itertools.chain(*Numbered().read(lambda *_: None, str(source), 2)))
    for step in steps:
        lines = [step.encode(line) for line in lines] if step is not None else lines
    dictionary = Dictionary.load(str(data / "dict.txt"))
    return [dictionary.encode_line(line, add_if_not_exist=False).tolist() for line in lines]


def placed(words: list[str], folder: Path) -> list[str]:
    """The flags of a page's command, about another prepared folder."""
    return [word.replace("data/mine", str(folder)).replace("fairseq_ms", str(USER_DIR)) for word in words]


def test_pages_show_commands() -> None:
    assert "docs/guide.md" in SHOWN["interactive"]
    assert {"docs/guide.md", "user_dir_examples/quickstart.ipynb"} <= SHOWN["hub"].keys()


@pytest.mark.parametrize("name", PIPELINES)
def test_every_command_on_a_page_reads_a_text_as_it_was_prepared(name: str, prepare: Any, tmp_path: Path) -> None:
    out, _ = prepare(name)
    data, expected = out / "bin", symbols(out / "bin")
    assert len(expected) == 4
    for page, commands in SHOWN["interactive"].items():
        for words in commands:
            assert read(data, placed(words, out), f"\ufeff{PLAIN}{ODD}") == expected, page
    trained.write_checkpoint(tmp_path / "model.pt", data, "vanilla_lm", *trained.TINY, "--tokens-per-sample", "400")
    lines = [f"{line}\n" for line in f"{PLAIN}{ODD}".split("\n")[:-1]]
    for page, calls in SHOWN["hub"].items():
        for settings in calls:
            hub = MODEL_REGISTRY["vanilla_lm"].from_pretrained(str(tmp_path), "model.pt", str(data), **settings)
            assert [hub.encode(line).tolist() for line in lines] == expected, page
            assert hub.score(lines[0])["tokens"].tolist() == expected[0][:-1], page
            with pytest.raises(UsageError, match="replace_newline_with_eos"):
                hub.score(PLAIN)
            plain = hub.decode(hub.encode(lines[2]))
            assert plain == ("The old man.\r" if name == "hf_byte_bpe" else "The old man.")


@pytest.mark.parametrize("name", PIPELINES)
def test_without_the_manifest_the_flags_that_prepare_prints_read_ordinary_text_so_too(name: str, prepare: Any) -> None:
    out, last = prepare(name)
    alone = out.with_name("alone")
    if not alone.exists():
        shutil.copytree(out / "bin", alone)
    flags = shlex.split(last) if last.startswith("  --") else []
    assert bool(flags) == (name in WITH_FLAGS)
    if flags or name == "white space":
        assert read(alone, flags, f"\ufeff{PLAIN}") == symbols(out / "bin")[:3]


@pytest.mark.parametrize(
    ("name", "flags", "flag"),
    [
        ("bpe", ["--tokenizer", "nltk"], "--tokenizer"),
        ("bpe", ["--tokenizer", "moses", "--source-lang", "fr"], "--source-lang"),
        ("bpe", ["--bpe", "gpt2"], "--bpe"),
        ("bpe", ["--bpe", "subword_nmt", "--bpe-codes", "none"], "--bpe-codes"),
        ("bpe", ["--bpe", "subword_nmt", "--bpe-separator", "__"], "--bpe-separator"),
        ("white space", ["--tokenizer", "moses"], "--tokenizer"),
        ("hf_byte_bpe", ["--bpe", "hf_byte_bpe", "--bpe-add-prefix-space"], "--bpe-add-prefix-space"),
        ("char", ["--bpe", "subword_nmt", "--bpe-codes", "none"], "--bpe"),
    ],
)
def test_flags_that_contradict_the_data_are_one_sentence(name: str, flags: list[str], flag: str, prepare: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{flag} must .*manifest\.json describes: got "):
        read(prepare(name)[0] / "bin", flags, PLAIN)


@pytest.mark.parametrize("name", WITH_FLAGS)
def test_flags_that_agree_change_nothing_and_text_may_be_tokenised_already(name: str, prepare: Any) -> None:
    out, last = prepare(name)
    expected = symbols(out / "bin")
    forgotten = [flag for flag in shlex.split(last) if not flag.startswith("--moses")]
    copied = out.with_name("copied")
    shutil.copytree(out, copied, dirs_exist_ok=True)
    for flags in (shlex.split(last), forgotten, shlex.split(last.replace(str(out), str(copied)))):
        assert read(out / "bin", flags, f"{PLAIN}{ODD}") == expected, flags
    tokenised = (out / "text" / "train.txt").read_bytes().decode()
    assert read(out / "bin", ["--tokenizer", "space"], tokenised) == expected


def test_fairseq_interactive_answers_in_text(prepare: Any, tmp_path: Path) -> None:
    out, _ = prepare("bpe")
    path = trained.write_checkpoint(
        tmp_path / "model.pt", out / "bin", "vanilla_lm", *trained.TINY, "--tokens-per-sample", "400"
    )
    (tmp_path / "prompts").write_text("The baker's son & <b>\n")
    command = ["fairseq-interactive", out / "bin", "--user-dir", USER_DIR, "--path", path, "--cpu", "--beam", "1"]
    command += ["--task", "language_modeling", "--max-len-b", "40", "--input", tmp_path / "prompts"]
    assert run(command, tmp_path / "log") == [0], (tmp_path / "log").read_text()
    printed = (tmp_path / "log").read_text()
    assert re.search(r"^S-0\t[^<]*< b >$", printed, re.MULTILINE), printed
    assert re.search(r"^D-0\t\S+\tThe baker's son & < b >", printed, re.MULTILINE), printed
