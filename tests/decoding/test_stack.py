"""The state of a stack of layers."""

import torch
from fairseq_ms.decoding.stack import StackState

from fairseq_ms.core.layers import LayerConfig, TokenEmbedding, TransformerStack


def test_a_stack_moves_all_its_layers_together() -> None:
    embed = TokenEmbedding(torch.nn.Embedding(9, 4), 12, 4)
    state = StackState(embed, TransformerStack(LayerConfig(4, 6, 2), 3).eval(), 2, 4)
    with torch.no_grad():
        state.prefill(torch.randint(9, (2, 3)))
    before = [(cache.keys.clone(), cache.values.clone()) for cache in state.caches]
    state.reorder(torch.tensor([1, 1]))
    state.truncate(2)
    assert state.length == 2
    for cache, (keys, values) in zip(state.caches, before, strict=True):
        assert torch.equal(cache.keys, keys[[1, 1], :, :2])
        assert torch.equal(cache.values, values[[1, 1], :, :2])
