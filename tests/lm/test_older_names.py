"""Checkpoints of 0.2 and of every time since load into the models of today."""

import re

import torch

from fairseq_ms.core.stream_state import SavedMemory
from fairseq_ms.lm.older_names import TABLE, memory_of_today
from tests.registry import ARCHITECTURES, build, dictionary, random_case

ADAPTIVE = {
    **{"adaptive_input": True, "adaptive_input_cutoff": "4,8", "adaptive_softmax_cutoff": "4,8"},
    **{"tie_adaptive_weights": True, "decoder_layers": 1, "decoder_embed_dim": 64, "decoder_attention_heads": 2},
}

BUFFERS = ("embed.words._float_tensor", "adaptive_softmax.head._float_tensor", "adaptive_softmax.version")


def test_every_row_of_the_table_brings_checkpoints_of_before_it_to_those_of_today() -> None:
    models = [random_case(arch, 0).model for arch in ARCHITECTURES]
    models.append(build("vanilla_lm", ADAPTIVE, dictionary(9)))
    used = set()
    for model in models:
        today = {name: tensor + 1.0 for name, tensor in model.state_dict().items()}
        older = dict(today)
        if model.decoder.core.adaptive_softmax is not None:
            older |= {f"decoder.core.{part}": torch.zeros(1) for part in BUFFERS}
        # Coarse-only models had no scale, and then no model had a name of its own.
        of_scale = {name.replace("decoder.core.scale.", "decoder.core."): value for name, value in older.items()}
        of_02 = {name.replace("decoder.core.", "decoder."): value for name, value in of_scale.items()}
        for checkpoint in (older, of_scale, of_02):
            used |= {row for row, (_, old, _) in enumerate(TABLE) if any(re.search(old, name) for name in checkpoint)}
            model.load_state_dict(dict(checkpoint), strict=True)
            loaded = model.state_dict()
            assert loaded.keys() == today.keys()
            assert all(torch.equal(loaded[name], value) for name, value in today.items())
    assert used == set(range(len(TABLE)))


def test_a_memory_of_0_2_has_the_compressed_part_of_a_layer_before_the_rest() -> None:
    compressed, layer, pending = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.zeros(2, 0)
    saved: SavedMemory = {"states": {"layer0": layer, "compressed0": compressed, "layer1": layer}, "pending": pending}
    today = memory_of_today(saved)
    assert today["pending"] is pending
    assert {name: x.size(1) for name, x in today["states"].items()} == {"layer0": 8, "layer1": 5}
    assert torch.equal(today["states"]["layer0"], torch.cat([compressed, layer], dim=1))
    assert memory_of_today(today) == today
