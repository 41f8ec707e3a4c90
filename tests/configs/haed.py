import random

from tests.configs import random_parts

# With words, how many tokens a chunk has decides the shapes of what is computed, and so the order of additions;
# in float64.
TOLERANCE = 1e-12
DATA_DECIDES_SHAPES = True
LEARNED_POSITIONS = {"position_embed_dim": 2, "decoder_embed_dim": 8}


def random_flags(rng: random.Random, main: str | None = None) -> dict:
    encoder, decoder = rng.choice(["mlp", "lstm"]), rng.choice(["lstm", "transformer"])
    main = main or rng.choice(["transformer", "lstm"])
    segmentation = rng.choice(["words", "fixed"])
    room, positions = rng.choice([3, 6]), rng.choice([0, 2, 5])
    flags: dict = {
        "criterion": "cross_entropy",
        "encoder": encoder,
        "main": main,
        "decoder": decoder,
        "segmentation": segmentation,
        # The dictionaries of these tests and those of the command tests have word0.
        "separators": rng.choice(["word0", "word0 </s>", None]) if segmentation == "words" else None,
        "max_segment_len": rng.choice([1, 2, 3, 5]),
        "token_embed_dim": rng.choice([3, 4]),
        # Fewer, as many, and more than there is room for.
        "encoder_units": rng.choice([2, 3, 8]),
        "decoder_embed_dim": room + positions,
        "position_embed_dim": positions,
        "decoder_units": rng.choice([4, 6]),
    }
    if main == "transformer":
        flags |= {
            "decoder_layers": rng.choice([1, 2]),
            "decoder_ffn_embed_dim": rng.choice([5, 12]),
            "decoder_attention_heads": rng.choice([1, 2, 3]),
            "attention_head_dim": rng.choice([2, 4]),
        }
    else:
        flags["main_units"] = rng.choice([3, 7])
    if "transformer" in (main, decoder):
        flags |= {name: value for name, value in random_parts(rng).items() if name != "scale_embedding"}
        if main == "lstm":
            del flags["positions"]
        elif flags["positions"] != "learned":
            flags |= {"decoder_embed_dim": room, "position_embed_dim": 0}
    if decoder == "transformer":
        flags |= {"local_layers": rng.choice([1, 2]), "local_attention_heads": 2, "local_ffn_embed_dim": 9}
    return flags
