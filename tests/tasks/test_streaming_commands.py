"""fairseq's commands with the task that carries memories."""

import itertools
import random
from pathlib import Path

import pytest

from tests.helpers.cli import USER_DIR
from tests.helpers.corpus import train_command, write_corpus
from tests.helpers.forked import train


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_perplexity_at_other_lengths_than_in_training_does_not_depend_on_the_batch(data: Path, tmp_path: Path) -> None:
    # Weights so large that what a model sees shows in the digits that are printed.
    more = ("--update-freq", "2", "--num-workers", "2", "--mem-len", "6", "--max-update", "6", "--init-std", "0.6")
    save = tmp_path / "save"
    train(train_command("transformer_xl", data, save, *more), tmp_path / "log")
    losses: dict[tuple[int, int], list[float]] = {}
    for segment, memory, batch in ((24, 6, 1), (24, 6, 7), (5, 11, 2), (5, 11, 3), (5, 0, 2), (5, 0, 3)):
        overrides = ("--model-overrides", f"{{'mem_len': {memory}}}", "--batch-size", str(batch))
        command = ["fairseq-eval-lm", data, "--user-dir", USER_DIR, "--path", save / "checkpoint_last.pt", "--cpu"]
        command += ["--task", "streaming_language_modeling", "--tokens-per-sample", segment, *overrides]
        train(command, tmp_path / "log")
        printed = (tmp_path / "log").read_text()
        losses.setdefault((segment, memory), []).append(float(printed.split("Loss (base 2): ")[1].split(",")[0]))
    # Sums of float32 in another order, of which four decimals are printed: the last one may be rounded otherwise.
    assert all(one == pytest.approx(other, rel=0.0, abs=1.01e-4) for one, other in losses.values()), losses
    assert min(abs(one[0] - other[0]) for one, other in itertools.combinations(losses.values(), 2)) > 1e-3, losses


def test_a_prompt_longer_than_any_window_is_generated_from(data: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    train(train_command("transformer_ql", data, save, "--mem-len", "6", "--max-update", "2"), tmp_path / "log")
    rng = random.Random(1)
    prompt = " ".join(f"word{rng.randrange(18)}" for _ in range(150))
    (tmp_path / "prompt").write_text(prompt + "\n")
    for search in (("--beam", "3"), ("--sampling", "--beam", "2", "--nbest", "2")):
        command = ["fairseq-interactive", data, "--user-dir", USER_DIR, "--path", save / "checkpoint_last.pt", "--cpu"]
        command += ["--task", "streaming_language_modeling", "--max-len-b", "170", "--input", tmp_path / "prompt"]
        train([*command, *search], tmp_path / "log")
        printed = (tmp_path / "log").read_text()
        assert f"\t{prompt}" in next(line for line in printed.splitlines() if line.startswith("H-0"))
