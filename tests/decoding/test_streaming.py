"""Cached decoding of the streaming models: what of a prompt is run in one pass, and what token by token."""

import pytest
import torch
from torch import Tensor

from fairseq_ms.core.memory import Mems
from fairseq_ms.core.streaming import WHOLE, Pasts
from tests.registry import build, dictionary

FLAGS = {"decoder_embed_dim": 8, "decoder_ffn_embed_dim": 8, "decoder_attention_heads": 2, "tokens_per_sample": 4}


@pytest.mark.parametrize("arch", ["transformer_xl", "compressive_transformer", "transformer_ql"])
def test_whole_segments_of_a_prompt_run_in_one_pass_and_an_unfinished_one_is_continued(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = dictionary(9)
    model = build(arch, {**FLAGS, "mem_len": 4, "init_std": 0.4}, words).eval().decoder.core
    tokens = torch.randint(4, len(words), (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.features(tokens)
    whole, in_one_pass = model.forward_segment, []

    def counted(x_BTD: Tensor, mems: Mems, positions: Tensor, pasts: Pasts = WHOLE) -> tuple[Tensor, Mems]:
        if not pasts:
            in_one_pass.append(x_BTD.size(1))
        return whole(x_BTD, mems, positions, pasts)

    monkeypatch.setattr(model, "forward_segment", counted)
    state = model.new_state(2, 17)
    with torch.no_grad():
        features = [model.features(part, state) for part in tokens.split([10, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(features, dim=1), expected, rtol=0.0, atol=1e-5)
    # Tokens 8 to 11 come in three pieces, and the last token is not a segment.
    assert in_one_pass == [4, 4, 4]
    assert state.length == 17
