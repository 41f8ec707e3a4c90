"""The models of transformers that are imported in the tests."""

from typing import Any

VERSIONS = ("transformers-4", "transformers-5")
SIZES: dict[str, Any] = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
WIDE: dict[str, Any] = {"head_dim": 6, "rms_norm_eps": 1e-3}
GPT2: dict[str, Any] = {"vocab_size": 29, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}
# Name -> class, settings; rope_theta is written where the version has it.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama_biases": ("Llama", {**SIZES, **WIDE, "attention_bias": True, "mlp_bias": True, "rope_theta": 50.0}),
    "llama_tied": ("Llama", {**SIZES, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": [7, 3]}),
    "llama_bf16": ("Llama", SIZES),
    # Which transformers does not look at.
    "llama_window": ("Llama", {**SIZES, "sliding_window": 4}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 5}),
    "mistral_full": ("Mistral", {**SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen2_sliding": (
        "Qwen2",
        {**SIZES, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {**SIZES, **WIDE}),
    "qwen3_types": (
        "Qwen3",
        {**SIZES, "use_sliding_window": True, "sliding_window": 4}
        | {"layer_types": ["sliding_attention", "full_attention"], "attention_bias": True, "head_dim": 4},
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2_inner": ("GPT2", {**GPT2, "n_inner": 20, "activation_function": "relu", "layer_norm_epsilon": 1e-3}),
}
GROUPED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_grouped": ("Llama", {**SIZES, "num_key_value_heads": 2}),
    "mistral_grouped": ("Mistral", {**SIZES, "num_key_value_heads": 2, "sliding_window": 5}),
    "qwen2_grouped": ("Qwen2", {**SIZES, "num_key_value_heads": 1}),
    "qwen3_grouped": ("Qwen3", {**SIZES, **WIDE, "num_key_value_heads": 2}),
}
LENGTHS = (1, 7, 23)
# With a tokenizer of the family's own kind, whose tokens they have; those of Llama 2 begin a text with <s>.
OF_TEXTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama_text": ("Llama", {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True}, "byte_fallback"),
    "mistral_text": ("Mistral", {**SIZES, "sliding_window": 5}, "byte_fallback"),
    "qwen2_text": ("Qwen2", SIZES, "split"),
    "gpt2_text": ("GPT2", {**GPT2, "n_positions": 64}, "byte_level"),
}
PROMPT = "She said: it's done"
WRITTEN = 30
