"""A transformer_lm of fairseq says the same as a model of this package, and fairseq's own commands agree."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.sequence_generator import SequenceGenerator
from fairseq_cli import eval_lm

from fairseq_ms import cli
from tests.helpers import asked, trained
from tests.helpers.cli import run_cli

SIZES = [*trained.NARROW, "--decoder-layers", "2", "--tokens-per-sample", "24"]
CUTOFFS = ["--adaptive-input-cutoff", "8,14", "--adaptive-softmax-cutoff", "8,14"]
CUTOFFS += ["--adaptive-input-factor", "2", "--adaptive-softmax-factor", "2", "--criterion", "adaptive_loss"]
INPUT = ["--decoder-input-dim", "16", "--decoder-output-dim", "16"]
LEARNED = ["--decoder-learned-pos", "--share-decoder-input-output-embed", "--max-target-positions", "30"]
CASES: dict[str, list[str]] = {
    "post": ["transformer_lm", *INPUT],
    "pre": ["transformer_lm", "--decoder-normalize-before", "--no-scale-embedding", *INPUT],
    "gpt": ["transformer_lm_gpt", *LEARNED],
    "bos": ["transformer_lm_gpt", *LEARNED, "--add-bos-token", "--activation-fn", "gelu_fast"],
    "nowhere": ["transformer_lm_gpt", "--no-token-positional-embeddings"],
    "wiki103": ["transformer_lm_wiki103", *CUTOFFS],
    "own_projections": ["transformer_lm_gpt", *CUTOFFS, "--adaptive-input", "--tie-adaptive-weights"],
    "softmax_alone": ["transformer_lm_gpt", *CUTOFFS[2:4], *CUTOFFS[6:]],
    "gbw": ["transformer_lm_gbw"],
}


def louder(model: Any) -> None:
    """Biases and gains are no zeros and ones, so that each of them matters; the padding's embedding stays zero."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(torch.randn_like(parameter) * 0.3)
        elif "embed" not in name:
            parameter.mul_(2.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train, valid, test = (trained.random_lines(seed, lines) for seed, lines in ((1, 40), (2, 9), (3, 9)))
    folder = tmp_path_factory.mktemp("data") / "bin"
    return trained.write_corpus(folder, {"train": train, "valid": valid, "test": test})


def write(path: Path, data: Path, arch: str, *flags: str) -> Path:
    torch.manual_seed(2)
    return trained.write_checkpoint(path, data, arch, *SIZES, *flags, change=louder)


def loaded(path: Path, data: Path) -> Any:
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], {"data": str(data)})
    return model.eval(), task


def brought(source: Path, out: Path, *flags: str) -> Path:
    assert cli.main(["import", str(source), str(out), *flags]) == 0
    return out / "checkpoint.pt"


@torch.no_grad()
def differences(one: Any, other: Any, symbols: int) -> float:
    """The greatest between log-probabilities, at several lengths."""
    found = []
    for length in (1, 7, 23):
        tokens = torch.randint(4, symbols, (2, length), generator=torch.Generator().manual_seed(length))
        logs = [model.get_normalized_probs(model(tokens), log_probs=True, sample=None) for model in (one, other)]
        found.append(float((logs[0] - logs[1]).abs().max()))
    return max(found)


@pytest.mark.parametrize("name", CASES)
def test_probabilities_beams_and_losses_are_those_of_the_original(name: str, data: Path, tmp_path: Path) -> None:
    arch, *flags = CASES[name]
    original = write(tmp_path / "model.pt", data, arch, *flags)
    imported = brought(original, tmp_path / "out")
    (one, task), (other, _) = loaded(original, data), loaded(imported, tmp_path / "out")
    assert type(other).__name__ == "VanillaLanguageModel"
    dictionary = task.source_dictionary
    # Double precision would hide what fairseq computes in float32; log-probabilities reach -20.
    assert differences(one, other, len(dictionary)) < 1e-5
    prefix = torch.tensor([[dictionary.eos(), 5, 9, 4], [dictionary.eos(), 7, 7, 6]])
    sample = {"net_input": {"src_tokens": prefix, "src_lengths": torch.tensor([4, 4])}}
    tokens, scores = [], []
    for model in (one, other):
        generator = SequenceGenerator([model], dictionary, beam_size=3, max_len_a=0, max_len_b=12)
        found = task.inference_step(generator, [model], sample, prefix_tokens=prefix[:, 1:])
        tokens.append([beam["tokens"].tolist() for row in found for beam in row])
        scores.append([float(beam["score"]) for row in found for beam in row])
    assert tokens[0] == tokens[1]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert evaluated(original, data) == pytest.approx(evaluated(imported, data), abs=1e-5)


def evaluated(path: Path, data: Path) -> float:
    """The loss of the test split, in base 2, as fairseq-eval-lm has it."""
    arguments = [str(data), "--path", str(path), "--context-window", "5", "--num-workers", "0"]
    arguments += ["--tokens-per-sample", "18", "--batch-size", "4"]
    args = options.parse_args_and_arch(options.get_eval_lm_parser("language_modeling"), [*arguments, "--cpu"])
    return float(eval_lm.main(convert_namespace_to_omegaconf(args))["loss"])


def saved(data: Path, tmp_path: Path, arch: str = "transformer_lm_gpt", *flags: str) -> dict[str, Any]:
    return torch.load(write(tmp_path / "model.pt", data, arch, *flags), weights_only=True)


def resaved(state: dict[str, Any], path: Path) -> Path:
    torch.save(state, path)
    return path


def test_an_old_checkpoint_with_flags_in_a_namespace_and_other_names_is_the_same(data: Path, tmp_path: Path) -> None:
    state = saved(data, tmp_path, "transformer_lm_wiki103", *CUTOFFS)
    today = brought(tmp_path / "model.pt", tmp_path / "today")
    args = argparse.Namespace(**state["cfg"]["task"] | state["cfg"]["model"] | {"arch": "transformer_lm_wiki103"})
    del args.tie_adaptive_proj, args._name, args.decoder_input_dim
    args.no_tie_adaptive_proj = False
    tensors = state["model"]
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    for old, new in (("layer_norms.0", "self_attn_layer_norm"), ("layer_norms.2", "final_layer_norm")):
        for name in [name for name in tensors if f".{new}." in name]:
            tensors[name.replace(new, old)] = tensors.pop(name)
    tensors["decoder.version"] = torch.tensor([2.0])
    older = resaved({**state, "args": args, "cfg": None}, tmp_path / "old.pt")
    found = [torch.load(file, weights_only=True)["model"] for file in (today, brought(older, tmp_path / "old"))]
    assert found[0].keys() == found[1].keys()
    assert all(found[0][name].equal(found[1][name]) for name in found[0])


def test_half_precision_stays_and_so_do_the_rows_of_sinusoids(data: Path, tmp_path: Path) -> None:
    state = saved(data, tmp_path, "transformer_lm_gpt")
    state["model"] = {name: x.half() if x.is_floating_point() else x for name, x in state["model"].items()}
    path = brought(resaved(state, tmp_path / "half.pt"), tmp_path / "out")
    found = torch.load(path, weights_only=True)["model"]
    assert {x.dtype for name, x in found.items() if "positions" not in name} == {torch.float16}
    assert found["decoder.core.embed.positions.weight"].shape == (24, 16)


def test_a_file_of_something_else_and_a_cut_dictionary_are_one_sentence(
    data: Path, tmp_path: Path, capsys: Any
) -> None:
    torch.save([1], tmp_path / "list.pt")
    asked.assert_refused(["import", str(tmp_path / "list.pt"), str(tmp_path / "out")], "holds no model", capsys)
    command = ["import", str(write(tmp_path / "model.pt", data, *CASES["gpt"])), str(tmp_path / "out"), "--data"]
    for number, text in enumerate((b"w1 3\nw2", b"\xff 3\n")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "dict.txt").write_bytes(text)
        asked.assert_refused([*command, str(folder)], "--data must have the dict.txt of SOURCE: ", capsys)


def test_a_folder_of_neither_kind_is_one_sentence(tmp_path: Path, capsys: Any) -> None:
    command = ["import", str(tmp_path), str(tmp_path / "out")]
    asked.assert_refused(command, "SOURCE must be a checkpoint, or a folder of transformers with a config.json", capsys)


class Code:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_checkpoint_with_code_is_refused_and_runs_none(data: Path, tmp_path: Path, capsys: Any) -> None:
    state = saved(data, tmp_path)
    for number, (where, place) in enumerate(((state, "code"), (state["cfg"]["model"], "activation_fn"))):
        before: Any = where.get(place)
        where[place] = Code(tmp_path / "run")
        path = resaved(state, tmp_path / f"code{number}.pt")
        where[place] = before
        asked.assert_refused(["import", str(path), str(tmp_path / "out")], "SOURCE must hold tensors and plain", capsys)
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps(Code(tmp_path / "run")))
    asked.assert_refused(["import", str(bare), str(tmp_path / "out")], "is damaged", capsys)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()


ROW = torch.zeros(3, 16)
# What is changed of the settings and of the weights, and how the sentence goes on.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"character_embeddings": True}, {}, "SOURCE must be without character_embeddings"),
    ({"decoder_layerdrop": 0.2}, {}, "SOURCE must be without decoder_layerdrop"),
    ({"decoder_layers_to_keep": "0"}, {}, "SOURCE must be without decoder_layers_to_keep"),
    ({"quant_noise_pq": 0.1}, {}, "SOURCE must be without quant_noise_pq"),
    ({"quant_noise_scalar": 0.1}, {}, "SOURCE must be without quant_noise_scalar"),
    *(({f"scale_{what}": True}, {}, f"without scale_{what}") for what in ("fc", "attn", "heads", "resids")),
    ({"layernorm_embedding": True}, {}, "SOURCE must be without layernorm_embedding"),
    ({"base_layers": 1}, {}, "SOURCE must be without base_layers"),
    ({"decoder_input_dim": 3}, {"decoder.project_in_dim.weight": ROW}, "must have a decoder_input_dim that is its"),
    ({"decoder_output_dim": 3}, {"decoder.project_out_dim.weight": ROW}, "must have a decoder_output_dim that is its"),
    ({"activation_fn": "laplace"}, {}, "--activation-fn"),
    ({"decoder_layers": 3}, {}, "SOURCE must have the 3 layers that its configuration says: got weights of 2"),
    ({"decoder_layers": 10**12}, {}, "SOURCE must have the 1000000000000 layers"),
    ({"decoder_ffn_embed_dim": 10**12}, {}, "SOURCE must have weights of the sizes that its configuration says"),
    ({"decoder_embed_dim": "__import__('os')"}, {}, "SOURCE's decoder_embed_dim must be a whole number"),
    ({"adaptive_softmax_cutoff": "__import__('os')"}, {}, "must be a comma separated list of ascending whole"),
    ({}, {"decoder.layers.0.fc1.weight": None}, "there is no decoder.layers.0.fc1.weight"),
    ({}, {"decoder.layers.0.fc1.scale": ROW}, "SOURCE must have no weights that a model here has not: got decoder.lay"),
    ({}, {"decoder.layers.0.fc1.bias": torch.zeros(24, dtype=torch.int)}, "must have weights of floating point"),
    ({"_name": "lstm_lm"}, {}, "SOURCE must hold a transformer_lm, or a vanilla_lm without windows"),
]


@pytest.mark.parametrize(("settings", "weights", "sentence"), REFUSED)
def test_what_has_no_counterpart_is_one_sentence(settings, weights, sentence, data, tmp_path, capsys) -> None:
    state = saved(data, tmp_path)
    state["cfg"]["model"] |= settings
    state["model"] = {name: x for name, x in {**state["model"], **weights}.items() if x is not None}
    path = resaved(state, tmp_path / "changed.pt")
    asked.assert_refused(["import", str(path), str(tmp_path / "out")], sentence, capsys)
    assert not (tmp_path / "out").exists()


def test_our_own_model_becomes_one_of_windows(data: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ["--positions", "rotary", "--qk-norm", "scaled", "--short-conv", "2", "--sinks", "--no-bias"]
    source = write(tmp_path / "model.pt", data, "vanilla_lm", *flags)
    asked.assert_refused(["import", str(source), str(tmp_path / "none")], "--scale-windows must be given", capsys)
    wide = brought(source, tmp_path / "wide", "--scale-windows", "1x=0:*1,1x=0:99*1")
    (one, _), (other, _) = loaded(source, data), loaded(wide, data)
    assert type(other).__name__ == "RetinaLanguageModel"
    assert differences(one, other, 27) < 1e-5
    narrow, _ = loaded(brought(source, tmp_path / "narrow", "--scale-windows", "1x=0:4,4x=4:16"), data)
    assert differences(one, narrow, 27) > 1e-3


def test_a_coarse_head_has_the_rows_that_it_had(data: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "model.pt", data, "vanilla_lm", "--decoder-layers", "1")
    path = brought(source, tmp_path / "out", "--scale-windows", "1x=0:4,4x=4:16")
    ours, theirs = (torch.load(file, weights_only=True)["model"] for file in (path, source))
    qkv = theirs["decoder.core.stack.layers.0.attention.qkv.weight"]
    fine, coarse = (ours[f"decoder.core.layers.0.attention.{name}.weight"] for name in ("fine", "coarse.0"))
    queries, keys, values = qkv.split(16)
    assert fine.equal(torch.cat([queries, keys[:8], values[:8]]))
    assert coarse.equal(torch.cat([keys[8:], values[8:]]))


def test_commands_take_it_and_fine_tuning_begins_with_it(data: Path, tmp_path: Path, capsys: Any) -> None:
    source = write(tmp_path / "model.pt", data, "transformer_lm_gpt", *LEARNED)
    path = brought(source, tmp_path / "out", "--scale-windows", "1x=0:8")
    assert f"next: fairseq-ms perplexity {path} --data DATA" in capsys.readouterr().out
    assert cli.main(["perplexity", str(path), "--data", str(data), "--cpu"]) == 0
    assert "perplexity" in capsys.readouterr().out
    known = yaml.safe_load((path.parent / "finetune.yaml").read_text())
    assert known["checkpoint"]["finetune_from_model"] == str(path)
    settings = [
        f"checkpoint.save_dir={tmp_path / 'runs'}",
        "optimization.lr=[0.0]",
    ]
    command: list[Any] = ["fairseq-ms", "train", path.parent / "finetune.yaml", "--data", data, "--max-update", "1"]
    run_cli(*command, *settings, "common.cpu=true", "dataset.num_workers=0", cwd=tmp_path)
    before, after = (torch.load(x, weights_only=True)["model"] for x in (path, tmp_path / "runs/checkpoint_last.pt"))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
