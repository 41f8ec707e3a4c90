"""Every command block of README and documentation runs, in its shortest form, from the first page to the last."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cli import ROOT, USER_DIR, environment

# README makes what later pages go on with.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = r"(?:fairseq-[a-z-]+|python|make|pip|git|curl|torchrun|srun|lm_eval|echo|READTHEDOCS=1|\.|#SBATCH|\[) "
# What is not run here: a pattern of commands, and why.
EXCEPTIONS = {
    r"git clone": "clones what is tested",
    r"make ": "builds an environment or runs these tests; the workflows of CI are made of it",
    r"(READTHEDOCS=1 )?pip ": "installs into the environment that the tests run in; test_install makes one",
    r"\. ": "changes the shell that it is typed into",
    r"(torchrun|srun|#SBATCH|\[) ": "is for several machines or a queue; host/test_launching has processes of its own",
    r"(python serve\.py|curl) ": "is about a server of transformers; export/test_export has its generation",
    r"(lm_eval|fairseq-ms lm-eval) ": "needs lm-evaluation-harness beside the environment; harness/test_harness has it",
    r"fairseq-hydra-train|.*(multirun|/finetune/|config characters_)": "is a paper's model in full size, and its file; "
    "test_examples has the real command compose every such file and build its model",
    r".* \.\.\.": "stands for any command with flags that the page has above",
    r"fairseq-ms .*( llama | imported|windows/(checkpoint|finetune))": "is of a Llama, which needs transformers beside "
    "the environment; importing/test_hf_models imports several",
    r".*--model_args|.*wikitext2": "is of data that are not here; harness/test_harness runs the commands",
}
# Long runs and large sizes as short and small ones.
SHORTER = {
    r"--max-update \d+": "--max-update 2",
    r"--bpe-merges \d+": "--bpe-merges 20 --workers 1 --quiet",
    r"--steps \d+": "--steps 2 --rows 2 --length 16",
    r"--max-len-b \d+": "--max-len-b 5",
    r"dim=144 ffn_dim=576": "dim=48 ffn_dim=32",
    r"(--prompt \"[^\"]+\")": r"\1 --max-new-tokens 5",
    r"--user-dir fairseq_ms": f"--user-dir {USER_DIR}",
    r"python user_dir_examples": f"python {ROOT}/user_dir_examples",
    r"(fairseq-train .*)": r"\1 --decoder-embed-dim 48 --decoder-ffn-embed-dim 32 --tokens-per-sample 32 --cpu",
    r"--tokens-per-sample 512 --context-window 256": "--tokens-per-sample 32 --context-window 16",
    # Pages give models and folders of one name, each its own.
    r"(--vocab-from tokenizer\.json) --out data/mine": r"\1 --out data/tokenizer",
    r"(fairseq-ms export .*)": r"rm -rf exported; \1",
    r"(fairseq-train .*checkpoints/mine|fairseq-ms train configs/mine.yaml)": r"rm -rf checkpoints/mine; \1",
    r"(fairseq-ms train .*)": r"\1 model.decoder_embed_dim=48 task.tokens_per_sample=32 optimization.max_update=2",
}


def commands_of(page: Path) -> Iterator[str]:
    """The commands of a page's blocks, without comments and with their continuations."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        if language not in ("", "sh", "bash", "console"):
            continue
        lines = block.replace("\\\n", " ").splitlines()
        if re.match(PROGRAMS, lines[0]):
            yield from (re.sub(r"(?<=\S)  +# .*| +#? *$", "", line) for line in lines if line.strip())


def reason_of(command: str) -> str | None:
    """Why a command is not run here; None for one that is."""
    return next((reason for pattern, reason in EXCEPTIONS.items() if re.match(pattern, command)), None)


def shorter(command: str) -> str:
    for pattern, short in SHORTER.items():
        command = re.sub(pattern, short, command)
    return command


def test_every_page_with_commands_is_found_and_no_exception_is_left_over() -> None:
    commands = [command for page in PAGES for command in commands_of(page)]
    assert sum(reason_of(command) is None for command in commands) >= 20
    assert all(re.match(PROGRAMS, command) for command in commands), "a command of another program, or half of one"
    unused = [pattern for pattern in EXCEPTIONS if not any(re.match(pattern, command) for command in commands)]
    assert not unused


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages say that one has."""
    folder = tmp_path_factory.mktemp("pages")
    text = "".join(f"The old man went to town number {number}.\nHe sang.\n\n" for number in range(300))
    for name in ("texts/a.txt", "texts/b.txt", "other/c.txt", "stories/d.jsonl", "wikitext-2/e"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
    for name in ("texts/a.txt", "texts/b.txt", "other/c.txt"):
        (folder / name).write_text(text)
    stories = (json.dumps({"text": f"Story {number}.\n{text[:300]}"}) for number in range(40))
    (folder / "stories/d.jsonl").write_text("\n".join(stories) + "\n")
    articles = "".join(f" \n = Town {number} = \n \n The old man went to it . \n" for number in range(60))
    for split in ("train", "valid", "test"):
        (folder / f"wikitext-2/wiki.{split}.tokens").write_text(articles)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
def test_the_commands_of_all_pages_run_one_after_the_other(place: Path) -> None:
    programs = str(Path(sys.executable).parent)
    env = environment({"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""})
    failed = []
    for page in PAGES:
        for command in commands_of(page):
            if reason_of(command) is None:
                shell = ["bash", "-o", "pipefail", "-c", shorter(command)]
                done = subprocess.run(
                    shell, cwd=place, env=env, capture_output=True, text=True, timeout=600, check=False
                )
                if done.returncode:
                    failed.append(f"{page.name}: {shell[-1]}\n{done.stdout[-600:]}{done.stderr[-600:]}")
    assert not failed, "\n\n".join(failed)
