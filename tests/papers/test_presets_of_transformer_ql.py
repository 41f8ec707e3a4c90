"""Every preset of the Transformer-QL paper: Appendix E's numbers, its hydra file and its training script."""

import itertools
import os
import subprocess
from pathlib import Path

import pytest
from fairseq.dataclass.configs import FairseqConfig

from fairseq_ms.presets.registry import PRESETS
from tests.helpers.hydra import OF_PAPERS, by_arch, by_hydra, parameters

EXAMPLES = Path(__file__).resolve().parents[2] / "user_dir_examples" / "transformer_ql"
MODELS = ("transformer_xl", "compressive_transformer", "transformer_ql")
ARCHS = sorted(arch for arch, preset in OF_PAPERS.items() if preset.model in MODELS)
# Table 4.
VOCABULARIES = {"simplebooks2": 11_492, "simplebooks92": 98_304, "wt103": 267_735}


def dataset_of(arch: str) -> str:
    return next(name for name in VOCABULARIES if arch.removesuffix("_ms").split("_d")[0].endswith(f"_{name}"))


def hand_count(arch: str) -> int:
    """Eight Transformer-XL layers and tied embeddings; Appendix E's sizes."""
    dataset = dataset_of(arch)
    dim = 256 if dataset == "simplebooks2" else 512 if arch.endswith("_d512") else 1024 if "_d1024" in arch else 1536
    # "Keeping the rest of the hyper-parameters same" (Appendix E): Table 2's narrow models have 16 heads of 96, too.
    ffn = 1024 if dim == 256 else 6144
    attention = 5 * dim * (256 if dim == 256 else 16 * 96)
    layer = attention + (dim * ffn + ffn + ffn * dim + dim) + 2 * 2 * dim
    total = 8 * layer + 2 * (256 if dim == 256 else 16 * 96)
    if arch.startswith("compressive"):
        total += 8 * (2 * dim * dim + dim)
    if arch.startswith("transformer_ql"):
        # A layer norm after each of the two scales.
        total += 2 * 2 * dim
    if dataset == "simplebooks2":
        return total + VOCABULARIES[dataset] * dim
    bounds = [0, 20_000, 40_000, *([200_000] if dataset == "wt103" else []), VOCABULARIES[dataset]]
    for band, (start, end) in enumerate(itertools.pairwise(bounds)):
        width = dim // 4**band
        total += (end - start) * width + width * dim
    # The head of the adaptive softmax tells the tails apart.
    return total + dim * (len(bounds) - 2)


def lengths(arch: str) -> tuple[int, int, int | None]:
    """n_s, n_m and n_cm of training, by Appendix E and, for the Multi-scale Transformer, Table 5."""
    if arch.endswith("_ms"):
        return {"simplebooks2": 16, "simplebooks92": 64, "wt103": 128}[dataset_of(arch)], 0, None
    n = 16 if dataset_of(arch) == "wt103" else 8
    return (n // 2, 3 * n // 4, 3 * n // 4) if arch.startswith("compressive") else (n, n, None)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_preset_is_what_appendix_e_says(arch: str) -> None:
    cfg = by_arch(arch)
    assert (cfg.tokens_per_sample, cfg.mem_len, getattr(cfg, "compressed_mem_len", None)) == lengths(arch)
    assert parameters(PRESETS[arch].model, cfg, VOCABULARIES[dataset_of(arch)]) == hand_count(arch)


def run_script(name: str, folder: Path, *arguments: str) -> str:
    """What a script prints where all commands of fairseq, in this folder, print what they are given."""
    for program in ("fairseq-train", "fairseq-eval-lm", "fairseq-ms"):
        (folder / program).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (folder / program).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run([EXAMPLES / name, *arguments], env=environment, capture_output=True, text=True).stdout


@pytest.mark.parametrize("arch", ARCHS)
def test_the_training_script_says_what_the_hydra_file_says(arch: str, tmp_path: Path) -> None:
    cfg = by_hydra(arch)
    given = run_script("train.sh", tmp_path, arch, "data-bin", "--fp16").splitlines()
    flags = dict(itertools.pairwise(given))
    assert flags["--arch"] == arch
    assert flags["--task"] == cfg.task._name
    assert int(flags["--tokens-per-sample"]) == cfg.task.tokens_per_sample == lengths(arch)[0]
    assert int(flags["--batch-size"]) == cfg.dataset.batch_size
    assert flags["--criterion"] == cfg.criterion._name
    # fairseq's default, unless fairseq refuses it.
    backend = (
        "legacy_ddp" if cfg.criterion._name == "adaptive_loss" else FairseqConfig().distributed_training.ddp_backend
    )
    assert flags.get("--ddp-backend", "pytorch_ddp") == cfg.distributed_training.ddp_backend == backend
    assert float(flags["--lr"]) == cfg.optimization.lr[0]
    assert float(flags["--min-lr"]) == pytest.approx(cfg.lr_scheduler.min_lr)
    assert float(flags["--clip-norm"]) == cfg.optimization.clip_norm
    assert int(flags["--max-update"]) == cfg.optimization.max_update
    assert given[-1] == "--fp16"


def test_the_evaluation_script_sets_the_lengths(tmp_path: Path) -> None:
    given = run_script("evaluate.sh", tmp_path, "c.pt", "data-bin", "8", "12", "12", "--cpu").splitlines()
    flags = dict(itertools.pairwise(given))
    assert flags["--tokens-per-sample"] == "8"
    assert flags["--model-overrides"] == "{'mem_len': 12, 'compressed_mem_len': 12}"
    assert given[-1] == "--cpu"
    assert "compressed" not in run_script("evaluate.sh", tmp_path, "c.pt", "data-bin", "4", "12")
