"""lm-evaluation-harness is told by its model ``fairseq_ms`` what fairseq itself says of a checkpoint."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig

from fairseq_ms import cli
from fairseq_ms.errors import UsageError
from fairseq_ms.harness import generation
from fairseq_ms.tools.checkpoints import Checkpoint
from tests.harness.cases import CASES, REFUSED
from tests.helpers.beside import library
from tests.helpers.cli import ROOT, run_cli
from tests.registry import random_case


@pytest.fixture(scope="session")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the harness makes of each checkpoint, and what its command prints; without a network."""
    folders = [str(library(name, tmp_path_factory.getbasetemp())) for name in ("lm-eval", "transformers-5")]
    cache = tmp_path_factory.mktemp("cache")
    env = {"PYTHONPATH": os.pathsep.join(folders), "HF_HOME": str(cache)}
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    folder = tmp_path_factory.mktemp("asked")
    done = run_cli("python", "-m", "tests.harness.asking", folder, env=env, cwd=ROOT, timeout=900)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert [answer["name"] for answer in found] == [*CASES, "imported", "commands"]
    return {answer["name"]: answer for answer in found}


@pytest.fixture
def answers(printed: dict[str, dict]) -> list[dict]:
    """What the harness makes of each checkpoint."""
    return [printed[name] for name in CASES]


def test_bits_per_byte_of_a_text_are_those_of_the_perplexity_command_at_any_batch_size(answers) -> None:
    for answer in answers:
        ours = answer["perplexity"]
        # Sums of float32 in another order.
        assert answer["tokenised"] == pytest.approx(ours["bits_per_byte"], abs=1e-6), answer
        if answer["name"] != "moses":
            assert answer["raw 1"] == pytest.approx(ours["bits_per_source_byte"], abs=1e-6), answer
        assert answer["raw 3"] == pytest.approx(answer["raw 1"], abs=1e-6), answer


def test_continuations_have_the_likelihood_of_one_forward_pass(answers) -> None:
    assert any(answer["some are greedy"] for answer in answers)
    for answer in answers:
        for batch in (1, 3):
            # Sums of up to a dozen log-probabilities down to -20, of float32 in another order.
            assert answer[f"difference {batch}"] <= 1e-4, answer
            assert answer[f"greedy {batch}"], answer
        assert answer["nothing is refused"], answer
        assert answer["finite weights"] == [True, True], answer
        assert answer["chosen"] == [1.0, 1.0], answer


def test_texts_are_those_of_whole_forward_passes_and_settings_work(answers) -> None:
    for answer in answers:
        assert answer["written"] == [1.0, 1.0], answer
        for claim in ("a stop string is cut off", "one string may stop", "the best alone is greedy"):
            assert answer[claim], (claim, answer)
        for claim in ("samples differ from greedy", "a nucleus of one is greedy", "long contexts are cut"):
            assert answer[claim], (claim, answer)


def test_an_imported_model_reads_what_its_source_reads(printed) -> None:
    # Log-probabilities are float32, of weights in float64.
    assert printed["imported"]["difference"] <= 1e-5
    assert printed["imported"]["written"]


def test_the_command_prints_the_harnesss_table(printed) -> None:
    code, out, _ = printed["commands"]["table"]
    (row,) = [line.split("|") for line in out.splitlines() if "bits_per_byte" in line]
    assert f"{printed['retina']['raw 1']:.4f}" in [cell.strip() for cell in row], out
    assert code == 0


def test_what_cannot_work_is_one_sentence(printed) -> None:
    for (code, _, err), (arguments, _, sentence) in zip(printed["commands"]["refused"], REFUSED, strict=True):
        assert code == 2, (arguments, err)
        assert sentence in err.splitlines()[-1]
        assert "Traceback" not in err


def test_without_lm_eval_the_sentence_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert cli.main(["lm-eval", "--tasks", "raw"]) == 2
    assert "pip install lm_eval" in capsys.readouterr().err


def test_a_task_names_its_text_by_an_absolute_path(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("a line\n")
    assert cli.main(["lm-eval-task", "mine.txt", "tasks", "--name", "mine"]) == 0
    assert os.listdir("tasks") == ["mine.yaml"]
    assert f"test: {tmp_path / 'mine.txt'}" in Path("tasks/mine.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("no end", "mine", "TEXT must end in a line end"),
        ("caf\udce9\n", "mine", "TEXT must be UTF-8"),
        (None, "mine", "TEXT must be a file"),
        ("a line\n", "my task", "--name must consist of letters, digits and underscores: got 'my task'"),
    ],
)
def test_a_task_that_cannot_be_is_one_sentence(text, name, sentence, tmp_path: Path, capsys) -> None:
    if text is not None:
        (tmp_path / "mine.txt").write_text(text, errors="surrogateescape")
    assert cli.main(["lm-eval-task", str(tmp_path / "mine.txt"), str(tmp_path / "tasks"), "--name", name]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "tasks").exists()


def test_lengths_of_what_is_written() -> None:
    assert generation.settings({}, None).tokens == 256
    assert generation.settings({"until": "a"}, 40) == generation.Settings(("a",), 20)
    assert generation.settings({"max_new_tokens": 39}, 40).tokens == 39
    idle = {"top_p": 1.0, "num_beams": 1, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "use_cache": True}
    assert generation.settings(idle, 40) == generation.settings({}, 40)
    with pytest.raises(UsageError, match="max_gen_toks must be at least 1 and below the 40 tokens"):
        generation.settings({"max_gen_toks": 40}, 40)


@pytest.mark.parametrize("arch", ["vanilla_lm", "transformer_xl", "haed"])
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1.0])
def test_texts_are_written_by_finite_weights_alone(arch: str, temperature: float) -> None:
    case, prompts = random_case(arch, 1), torch.full((2, 3), 5)
    checkpoint = Checkpoint(
        "here", "model.pt", case.model, SimpleNamespace(source_dictionary=case.dictionary), DictConfig({})
    )
    asked = [generation.Settings((), 6, value) for value in (temperature, 0.0)]
    found, greedy = (generation.continued(checkpoint, prompts, one, str) for one in asked)
    assert (found == greedy) == (temperature < 1.0)
    best = int(greedy[0].strip("[]").split(", ")[0])
    (other, _) = generation.continued(checkpoint, prompts, asked[1], str, never=[best])
    assert str(best) not in other.strip("[]").split(", ")
    for weight in case.model.parameters():
        torch.nn.init.constant_(weight, float("nan"))
    with pytest.raises(ValueError, match="logits must be finite"):
        generation.continued(checkpoint, prompts, asked[0], str)


def test_the_first_stop_string_counts() -> None:
    assert generation.cut("one two three", ["three", "two", ""]) == "one "
    assert generation.cut("one", []) == "one"
