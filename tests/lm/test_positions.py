"""``--positions``: what a model trained on short samples does with long texts, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import scoring
from tests.helpers import trained
from tests.helpers.windows import naive_log_probs, scored_log_probs
from tests.registry import ARCHITECTURES, build, dictionary

SIZES: dict[str, Any] = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_attention_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    "vanilla_lm": {"decoder_layers": 2},
    "retina_lm": {"decoder_layers": 2, "scale_windows": "1x=0:4,4x=4:24"},
    "multiscale_topdown": {"scale_layers": "4x=1,1x=1"},
    "multiscale_bottomup": {"scale_layers": "4x=1,1x=1"},
    "coarse_lm": {"scale_layers": "4x=1"},
}
TRAINED = 16

either = pytest.mark.parametrize("positions", ["rotary", "none"])


def model_of(arch: str, own: dict[str, Any], **flags: Any) -> Any:
    torch.manual_seed(1)
    return build(arch, {**SIZES, "init_std": 0.4, **own, **flags}, dictionary(9), TRAINED).eval()


def test_models_with_positions_of_their_own_have_no_such_flags() -> None:
    for flag in ("positions", "rotary_base"):
        offering = [arch for arch in ARCHITECTURES if flag in MODEL_DATACLASS_REGISTRY[arch].__dataclass_fields__]
        assert offering == sorted([*OWN, "haed", "hred"])


@either
def test_the_main_model_of_haed_reads_texts_of_any_length(positions: str) -> None:
    flags = {"main": "transformer", "criterion": "cross_entropy", "init_std": 0.4, "decoder_embed_dim": 8}
    small = {"encoder_units": 8, "decoder_units": 6, "decoder_ffn_embed_dim": 9, "attention_head_dim": 4}
    torch.manual_seed(1)
    model = build("haed", {**flags, **small, "positions": positions}, dictionary(9), TRAINED).double().eval()
    assert model.decoder.core.main.positions is None
    tokens = torch.randint(4, 13, (2, 60))
    state: dict = {}
    with torch.no_grad():
        whole = model(tokens)[0]
        for end in range(40, 61):
            cached = model.decoder(tokens[:, :end], incremental_state=state)[0]
            torch.testing.assert_close(cached[:, -1], whole[:, end - 1], rtol=0.0, atol=1e-9)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = trained.random_lines(3, 12)
    return trained.write_corpus(tmp_path_factory.mktemp("corpus"), {"train": lines, "valid": lines, "test": lines})


def checkpoint_of(data: Path, folder: Path, *flags: str) -> Any:
    sizes = [*trained.TINY, "--init-std", "0.4", "--tokens-per-sample", str(TRAINED)]
    trained.write_checkpoint(folder / "one" / "model.pt", data, "vanilla_lm", *sizes, *flags)
    return trained.load(folder, "one")


@either
def test_evaluation_reads_windows_longer_than_those_of_training(data: Path, tmp_path: Path, positions: str) -> None:
    loaded = checkpoint_of(data, tmp_path, "--positions", positions)
    assert loaded.longest is None
    loaded.task.args.tokens_per_sample = 50
    rows = [
        loaded.task.source_dictionary.encode_line(line, add_if_not_exist=False) for line in trained.random_lines(3, 12)
    ]
    tokens = torch.cat(rows).long()
    expected = naive_log_probs(loaded.model, tokens, [50] * (len(tokens) // 50) + [len(tokens) % 50], 50, 0, None)
    loaded.task.load_dataset("test")
    found = scored_log_probs(loaded.model, loaded.task, "test", 0, False)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
    scores = scoring.score_documents(loaded, [tokens], window=50, context=0)
    torch.testing.assert_close(torch.from_numpy(-scores).float(), expected, rtol=0.0, atol=1e-5)


def test_learned_positions_refuse_windows_longer_than_they_are(data: Path, tmp_path: Path) -> None:
    loaded = checkpoint_of(data, tmp_path)
    assert loaded.longest == TRAINED
    with pytest.raises(UsageError, match=f"between 1 and the {TRAINED} positions"):
        scoring.score_documents(loaded, [torch.arange(4, 60) % 9 + 4], window=50)


@pytest.mark.parametrize("pair", [("learned", "rotary"), ("rotary", "learned"), ("none", "learned")])
def test_a_checkpoint_of_other_positions_is_one_sentence(pair: tuple[str, str]) -> None:
    saved, other = (model_of("vanilla_lm", {}, positions=positions) for positions in pair)
    with pytest.raises(UsageError, match=r"^the checkpoint does not fit .*--positions"):
        other.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(("arch", "own"), OWN.items())
def test_rows_may_be_longer_than_the_positions_unless_these_are_learned(arch: str, own: dict) -> None:
    model_of(arch, own, positions="rotary", max_target_positions=TRAINED - 1)
    with pytest.raises(UsageError, match="--tokens-per-sample must not exceed"):
        model_of(arch, own, max_target_positions=TRAINED - 1)
