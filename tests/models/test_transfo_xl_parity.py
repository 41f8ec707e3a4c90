"""``transformer_xl`` and Hugging Face's TransfoXL with the same weights give the same."""

from pathlib import Path

import pytest

from tests.helpers.beside import library
from tests.helpers.cli import run_cli

COMPARE = """
import torch
from benchmarks.peers import Shape
from benchmarks.streaming import copy_weights, streaming_model, transfo_xl

for seed, before in ((1, True), (2, False)):
    torch.manual_seed(seed)
    shape = Shape(dim=12, ffn_dim=20, heads=3, length=5, vocabulary=30, layers=4)
    ours = streaming_model(
        "transformer_xl", shape, decoder_layers=4, decoder_normalize_before=before, init_std=0.3
    ).eval()
    theirs = transfo_xl(shape, before).eval()
    copy_weights(ours, theirs)
    tokens = torch.randint(4, 30, (2, 15))
    mine = ours.decoder.core.stream(tokens, None)[0]
    mems, parts = None, []
    for start in range(0, 15, 5):
        out = theirs(tokens[:, start : start + 5], mems=mems)
        mems, _ = out.mems, parts.append(out.last_hidden_state)
    other = torch.cat(parts, dim=1)
    # The peer works in float32 and in nothing else.
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(mine)
    (mine * weight).sum().backward()
    (other * weight).sum().backward()
    pairs = [(ours.decoder.core.embed.words.weight, theirs.word_emb.emb_layers[0].weight)]
    for our, their in zip(ours.decoder.core.layers, theirs.layers):
        pairs += [(our.attention.qkv.weight, their.dec_attn.qkv_net.weight)]
        pairs += [(our.attention.position.weight, their.dec_attn.r_net.weight)]
        pairs += [((our.attention.norm or our.after_attention).weight, their.dec_attn.layer_norm.weight)]
        pairs += [(our.ffn.up.weight, their.pos_ff.CoreNet[0].weight)]
    for one, other in pairs:
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    print("equal", before)
"""


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the peer's packages."""
    return library("transfo-xl", tmp_path_factory.mktemp("beside"))


@pytest.mark.slow
def test_transformer_xl_equals_hugging_face_s_in_outputs_and_gradients(peer: Path, tmp_path: Path) -> None:
    (tmp_path / "compare.py").write_text(COMPARE)
    done = run_cli("python", tmp_path / "compare.py", env={"PYTHONPATH": str(peer)})
    assert done.stdout.split() == ["equal", "True", "equal", "False"]
