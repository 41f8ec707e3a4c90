"""What is imported from transformers says the same as there, of both pinned versions, at once and through the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_ms import cli, core
from fairseq_ms.tools import checkpoints
from tests.helpers import asked
from tests.importing.cases import CASES, GROUPED, LENGTHS, OF_TEXTS, VERSIONS

NAMES = [*CASES, *GROUPED]
WINDOWS = ("mistral", "mistral_grouped", "qwen2_sliding", "qwen3_types")


def brought(source: Path, out: Path, *flags: str) -> core.LanguageModel:
    assert cli.main(["import", str(source), str(out), *flags]) == 0
    found: Any = checkpoints.load(str(out / "checkpoint.pt"), cpu=True).core
    return found


def symbols_of(folder: Path) -> Tensor:
    """The symbol of ours for every token: that of the end of a line for a newline, or for the end of a text.

    What a tokenizer begins every text with is <s>.
    """
    config = json.loads((folder / "config.json").read_text())
    ends = config.get("eos_token_id")
    end, begin = ends[0] if isinstance(ends, list) else ends, None
    if (folder / "tokenizer.json").is_file():
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        end = vocabulary.get("<0x0A>", vocabulary.get("\u010a"))
        begin = config["bos_token_id"] if tokenizer["post_processor"] else None
    own = {begin: 0, end: 2}
    return torch.tensor([own.get(token, 4 + token) for token in range(config["vocab_size"])])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_and_losses_are_those_of_transformers(name: str, version: str, made: Any, tmp_path: Path) -> None:
    folder = made[version]
    model, symbols = brought(folder / name, tmp_path / "out"), symbols_of(folder / name)
    assert isinstance(model, core.Retina) == (name in WINDOWS)
    expected = torch.load(folder / f"{name}.pt", weights_only=True)
    for length in LENGTHS:
        tokens, theirs = symbols[expected[length]["tokens"]], expected[length]["logits"]
        ours, _ = model(tokens)
        # float32 of sums in another order; logits reach 10.
        assert (ours[..., symbols] - theirs).abs().max() < 1e-5
        others = torch.ones(33, dtype=torch.bool).index_fill(0, symbols, False)
        assert ours.softmax(-1)[..., others].max() == 0.0
        state, pieces = model.new_state(2, length), []
        for piece in tokens.split([min(4, length), *[1] * max(0, length - 4)], dim=1):
            pieces.append(model(piece, state)[0][..., symbols])
        assert (torch.cat(pieces, dim=1) - theirs).abs().max() < 1e-5
        if length > 1:
            assert abs(float(model.loss(tokens[:, :-1], tokens[:, 1:]) - expected[length]["loss"])) < 1e-5


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_the_copy_of_tied_embeddings_in_a_file_is_left_alone(name: str, made: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source, folder = made[VERSIONS[-1]] / name, tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = {key: tensor for file in source.glob("*.safetensors") for key, tensor in load_file(file).items()}
    words = next(tensor for key, tensor in tensors.items() if key.endswith(("embed_tokens.weight", "wte.weight")))
    save_file({**tensors, "lm_head.weight": words.clone()}, folder / "model.safetensors")
    models = brought(source, tmp_path / "without"), brought(folder, tmp_path / "with")
    tokens = torch.randint(4, 33, (2, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(*(model(tokens)[0] for model in models))


@pytest.mark.parametrize("name", list(OF_TEXTS))
def test_every_target_of_a_row_can_be_predicted(name: str, made: Any, tmp_path: Path) -> None:
    brought(made[VERSIONS[-1]] / name, tmp_path / "out")
    found: Any = checkpoints.load(str(tmp_path / "out" / "checkpoint.pt"), cpu=True)
    # fairseq puts a row's <s> before its targets, too.
    row = [*([0] if found.adds_bos else []), 2, 4 + 9, 4 + 20]
    logits, _ = found.core(torch.tensor([row]))
    assert (logits[..., row] > -1e30).all()
    # Each of fairseq's four, or the token whose place it takes.
    assert int((logits[0, 0] < -1e30).sum()) == 4


def test_bf16_stays_bf16(made: Any, tmp_path: Path) -> None:
    brought(made[VERSIONS[-1]] / "llama_bf16", tmp_path / "out")
    found = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["model"]
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


# A case, what is changed in its config.json, and how the sentence goes on.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "mixtral"}, "SOURCE must be of model_type llama, mistral, qwen2, qwen3, gpt2:"),
    ("llama", {"num_experts": 4}, "SOURCE must have num_experts None, or none"),
    ("llama", {"quantization_config": {"bits": 4}}, "SOURCE must have quantization_config None, or none"),
    ("llama", {"hidden_act": "gelu"}, "SOURCE must have hidden_act silu, or none"),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "which are not scaled: got rope_type linear",
    ),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "which are not scaled: got rope_type yarn"),
    ("llama", {"rope_scaling": "linear"}, "must be settings by name: got 'linear'"),
    ("llama", {"model_type": ["llama"]}, "SOURCE must be of model_type llama, mistral, qwen2, qwen3, gpt2:"),
    ("llama", {"partial_rotary_factor": 0.5}, "got partial_rotary_factor 0.5"),
    ("llama", {"intermediate_size": 20}, "SOURCE's intermediate_size must be a multiple of 8: got 20"),
    ("llama", {"hidden_size": 10**12}, "SOURCE must have weights of"),
    ("llama", {"vocab_size": 10**9}, "SOURCE must have weights of the sizes that its configuration says"),
    ("llama", {"num_hidden_layers": 10**12}, "SOURCE must have the 1000000000000 layers"),
    ("llama", {"num_hidden_layers": "__import__('os')"}, "SOURCE's num_hidden_layers must be a whole number"),
    ("llama", {"vocab_size": None}, "SOURCE's vocab_size must be a whole number of at least 1"),
    ("llama", {"num_key_value_heads": 3}, ""),
    ("qwen3", {"layer_types": ["linear_attention", "full_attention"]}, "SOURCE's layer_types must be 2 of"),
    ("qwen3_types", {"sliding_window": 0}, "SOURCE's sliding_window must be a whole number of at least 1"),
    ("gpt2", {"activation_function": "mish"}, "SOURCE's activation_function must be one of"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "must have scale_attn_by_inverse_layer_idx False, or none"),
    (
        "gpt2",
        {"tie_word_embeddings": False},
        "SOURCE must have the weights that its configuration says: there",
    ),
]


@pytest.mark.parametrize(("name", "changes", "sentence"), REFUSED)
def test_what_has_no_counterpart_is_one_sentence(name, changes, sentence, made, tmp_path, capsys) -> None:
    source = made[VERSIONS[-1]] / name
    folder = tmp_path / "changed"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    asked.assert_refused(["import", str(folder), str(tmp_path / "out")], sentence, capsys)
    assert not (tmp_path / "out").exists()


# Indices of shards.
HOSTILE = {
    "{": "model.safetensors.index.json cannot be read",
    "[" * 100_000: "model.safetensors.index.json cannot be read",
    "[]": "holds no settings",
    "{}": "model.safetensors.index.json must have a weight_map of tensors' names to files: got none",
    '{"weight_map": ["a"]}': "must have a weight_map of tensors' names to files: got ['a']",
    '{"weight_map": {"wte.weight": 3}}': "must have a weight_map of tensors' names to files: got {'wte.weight': 3}",
    '{"weight_map": {}}': "must have a weight_map of tensors' names to files: got {}",
    '{"weight_map": {"wte.weight": "none.safetensors"}}': "none.safetensors is missing",
    '{"weight_map": {"wte.weight": "/etc/passwd"}}': "/etc/passwd is missing",
    '{"weight_map": {"wte.weight": ".."}}': ".. is missing",
}


def test_a_tensor_in_two_files_is_refused(made: Any, tmp_path: Path, capsys: Any) -> None:
    source = made[VERSIONS[-1]] / "gpt2"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    index = {"weight_map": {"wte.weight": "a.safetensors", "wpe.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    command = ["import", str(tmp_path), str(tmp_path / "out")]
    asked.assert_refused(command, "SOURCE must have every tensor once: b.safetensors has transformer.h.0", capsys)


def test_a_tokenizer_that_cannot_be_read_is_refused(made: Any, tmp_path: Path, capsys: Any) -> None:
    for file in (made[VERSIONS[-1]] / "gpt2").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for data in (b"{", b"\xff", b"[" * 100_000):
        (tmp_path / "tokenizer.json").write_bytes(data)
        command = ["import", str(tmp_path), str(tmp_path / "out")]
        asked.assert_refused(command, "SOURCE must have a tokenizer.json that tokenizers reads", capsys)


def test_files_that_lie_elsewhere_are_missing_or_damaged_are_refused(made: Any, tmp_path: Path, capsys: Any) -> None:
    source = made[VERSIONS[-1]] / "gpt2"
    command = ["import", str(tmp_path), str(tmp_path / "out")]
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"code")
    asked.assert_refused(command, "SOURCE must have its weights in model.safetensors", capsys)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": f"../{source.name}/model.safetensors"}}))
    asked.assert_refused(command, "SOURCE must have its weights in model.safetensors", capsys)
    for text, sentence in HOSTILE.items():
        index.write_text(text)
        asked.assert_refused(command, sentence, capsys)
    index.unlink()
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-9])
    asked.assert_refused(command, "SOURCE must have undamaged safetensors", capsys)
    (tmp_path / "config.json").write_text("[]")
    asked.assert_refused(command, "holds no settings", capsys)


def test_windows_of_the_command_replace_its_own(made: Any, tmp_path: Path) -> None:
    model: Any = brought(made[VERSIONS[-1]] / "mistral", tmp_path / "out", "--scale-windows", "1x=0:4*2,1x=0:*2")
    assert [scale.window for scale in model.turns[0]] == ["1x=0:4", "1x=0:"]
