"""``transformer_xl`` and Hugging Face's TransfoXL with the same weights give the same."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.helpers.cli import ROOT

# The last series of releases that has the model; it wants older packages than ours beside it.
PEER = "transformers==4.35.2"

COMPARE = """
import torch
import fairseq_ms
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
    mine = ours.decoder.stream(tokens, None)[0]
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
    pairs = [(ours.decoder.embed.words.weight, theirs.word_emb.emb_layers[0].weight)]
    for our, their in zip(ours.decoder.layers, theirs.layers):
        pairs += [(our.attention.qkv.weight, their.dec_attn.qkv_net.weight)]
        pairs += [(our.attention.position.weight, their.dec_attn.r_net.weight)]
        pairs += [(our.attention_norm.weight, their.dec_attn.layer_norm.weight)]
        pairs += [(our.ffn.up.weight, their.pos_ff.CoreNet[0].weight)]
    for one, other in pairs:
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    print("equal", before)
"""


@pytest.fixture(scope="session")
def python_with_peer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has the peer, installed beside this environment where it is missing from it."""
    if importlib.util.find_spec("transformers") is not None:
        return sys.executable
    if not os.environ.get("CI"):
        pytest.skip(f"needs Hugging Face's TransfoXL: pip install {PEER}, or set CI to install it for this test")
    folder = tmp_path_factory.mktemp("peer")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # Torch and fairseq come from the environment of the tests.
    (folder / "lib" / version / "site-packages" / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True)
    return str(python)


@pytest.mark.slow
def test_transformer_xl_equals_hugging_face_s_in_outputs_and_gradients(python_with_peer: str, tmp_path: Path) -> None:
    script = tmp_path / "compare.py"
    script.write_text(COMPARE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python_with_peer, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal", "True", "equal", "False"]
