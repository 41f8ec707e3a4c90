"""fairseq's own commands, run as a user runs them, for every architecture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils, tasks
from fairseq_cli.eval_lm import eval_lm

from tests.helpers.cli import USER_DIR
from tests.helpers.corpus import random_flags, train_command, write_corpus
from tests.helpers.forked import run, train
from tests.registry import ARCHITECTURES, GENERATORS, by_family, setting


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory):
    """Checkpoints by architecture, trained when first asked for."""
    checkpoints: dict[str, Path] = {}

    def checkpoint(arch: str) -> Path:
        if arch not in checkpoints:
            folder = tmp_path_factory.mktemp(arch)
            train(train_command(arch, data, folder), folder / "log")
            checkpoints[arch] = folder / "checkpoint_last.pt"
        return checkpoints[arch]

    return checkpoint


class _Counted:
    """Batches, and how many of their targets are scored."""

    def __init__(self, batches: Iterable, padding: int) -> None:
        self.batches, self.padding, self.targets = batches, padding, 0

    def __iter__(self) -> Iterator:
        for batch in self.batches:
            starts = batch.get("start_indices", [0] * batch["target"].size(0))
            for row, start in zip(batch["target"], starts):
                self.targets += int(row[start:].ne(self.padding).sum())
            yield batch


@pytest.mark.parametrize("arch", by_family(GENERATORS))
def test_perplexity_does_not_depend_on_how_the_corpus_is_batched(arch: str, trained, data: Path) -> None:
    results = set()
    window = setting(arch, "CONTEXT_WINDOW", 9)
    # Workers are started for one model of blocks and one of streams.
    several = 2 if arch in ("retina_lm", "transformer_xl") else 0
    for batch_size, workers, shards in ((1, 0, 1), (5, several, 1), (2, 0, 3)):
        score, count = 0.0, 0
        for shard in range(shards):
            state = checkpoint_utils.load_checkpoint_to_cpu(str(trained(arch)))
            state["cfg"]["task"]["tokens_per_sample"] = 24 - window
            task = tasks.setup_task(state["cfg"]["task"])
            models, _ = checkpoint_utils.load_model_ensemble([str(trained(arch))], task=task)
            task.load_dataset("test")
            batches = task.eval_lm_dataloader(
                task.dataset("test"),
                batch_size=batch_size,
                max_positions=models[0].max_positions(),
                num_workers=workers,
                context_window=window,
                num_shards=shards,
                shard_id=shard,
            )
            scored = _Counted(batches, task.dictionary.pad())
            result = eval_lm(models, task.source_dictionary, scored, device=torch.device("cpu"))
            targets = scored.targets
            score, count = score + float(result["loss"]) * targets, count + targets
        assert count == sum(len(line.split()) + 1 for line in (data.parent / "test.txt").read_text().splitlines())
        results.add(round(score / count, 5))
    assert max(results) - min(results) <= 2e-5, results


def printed(place: Path, *command: object) -> str:
    """What a command prints, which ends well."""
    assert run([str(part) for part in command], place / "log") == [0], (place / "log").read_text()[-3000:]
    return (place / "log").read_text()


@pytest.mark.parametrize("arch", by_family(GENERATORS))
def test_eval_lm_interactive_and_generate_run(arch: str, trained, data: Path, tmp_path: Path) -> None:
    common = ("--user-dir", USER_DIR, "--path", trained(arch), "--cpu")
    task = ("--task", setting(arch, "TASK", "language_modeling"))
    window = ("--tokens-per-sample", "24", "--context-window", min(12, setting(arch, "CONTEXT_WINDOW", 12)))
    (perplexity,) = re.findall(
        r"Perplexity: ([\d.]+)", printed(tmp_path, "fairseq-eval-lm", data, *common, *task, *window)
    )
    assert 1.0 < float(perplexity) < 60.0
    prompts = ("word1 word2", "word3", "word4 word5 word4 word5")
    (tmp_path / "prompts").write_text("\n".join(prompts) + "\n")
    sampled = printed(
        *(tmp_path, "fairseq-interactive", data, *common, *task, "--sampling", "--beam", "2", "--nbest", "2"),
        *("--max-len-b", "16", "--batch-size", "3", "--buffer-size", "3", "--input", tmp_path / "prompts"),
    )
    assert len(re.findall(r"^H-[012]\t", sampled, re.MULTILINE)) == 6
    for row, prompt in enumerate(prompts):
        assert re.search(rf"^H-{row}\t\S+\t{prompt}", sampled, re.MULTILINE)
    generated = printed(
        *(tmp_path, "fairseq-generate", data, *common, *task, "--gen-subset", "test", "--beam", "2"),
        *("--max-len-a", "1", "--max-len-b", "3", "--batch-size", "4", "--sample-break-mode", "eos"),
    )
    assert re.search(r"^H-\d+\t", generated, re.MULTILINE)


@pytest.mark.parametrize("arch", by_family(GENERATORS))
def test_the_hub_interface_samples_and_scores(arch: str, trained, data: Path) -> None:
    from fairseq.models import MODEL_REGISTRY

    checkpoint = trained(arch)
    hub = MODEL_REGISTRY[arch].from_pretrained(str(checkpoint.parent), checkpoint.name, str(data))
    torch.manual_seed(0)
    text = hub.sample("word1 word2", beam=1, sampling=True, max_len_b=12)
    assert text.startswith("word1 word2")
    assert hub.score("word1 word2 word1")["positional_scores"].numel() == 3


@pytest.mark.parametrize("arch", by_family(ARCHITECTURES))
def test_validate_and_hydra_train_run(arch: str, trained, data: Path, tmp_path: Path) -> None:
    printed(
        *(tmp_path, "fairseq-validate", data, "--user-dir", USER_DIR, "--path", trained(arch), "--cpu"),
        *("--task", setting(arch, "TASK", "language_modeling"), "--valid-subset", "valid", "--batch-size", "3"),
        *("--criterion", setting(arch, "CRITERION", "cross_entropy")),
    )
    config = {
        "common": {"user_dir": str(USER_DIR), "cpu": True},
        "task": {"_name": setting(arch, "TASK", "language_modeling"), "data": str(data), "tokens_per_sample": 24},
        "model": {"_name": arch, **random_flags(arch)},
        "criterion": {"_name": setting(arch, "CRITERION", "cross_entropy")},
        "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.98)"},
        "lr_scheduler": {"_name": "fixed"},
        "dataset": {"batch_size": 4, "num_workers": 0},
        "optimization": {"max_update": 2, "lr": [0.001]},
        "checkpoint": {"save_dir": str(tmp_path)},
    }
    # JSON is YAML.
    (tmp_path / "tiny.yaml").write_text(json.dumps(config))
    printed(
        tmp_path, "fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "tiny", f"hydra.run.dir={tmp_path}"
    )
    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint_last.pt"))
    assert state["cfg"]["dataset"]["required_batch_size_multiple"] == 1
