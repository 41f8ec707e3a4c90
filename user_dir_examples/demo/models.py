"""The demo's two models and how they are trained: fairseq's own flags."""

CONTEXT = 256

SHARED = {
    "--decoder-embed-dim": "144",
    "--decoder-ffn-embed-dim": "576",
    "--decoder-attention-heads": "6",
    "--decoder-layers": "4",
    "--share-decoder-input-output-embed": None,
    "--dropout": "0",
    "--attention-dropout": "0",
    "--tokens-per-sample": str(CONTEXT),
}

MODELS = {
    "vanilla_lm": {**SHARED, "--arch": "vanilla_lm"},
    "retina_lm": {**SHARED, "--arch": "retina_lm", "--scale-windows": "1x=0:16,4x=16:64,16x=64:256"},
}

UPDATES = 1200


def training(updates: int) -> dict[str, str | None]:
    """How both models are trained, in so many updates."""
    return {
        "--task": "language_modeling",
        "--criterion": "cross_entropy",
        "--optimizer": "adam",
        "--adam-betas": "(0.9, 0.98)",
        "--weight-decay": "0.1",
        "--clip-norm": "1.0",
        "--lr-scheduler": "cosine",
        "--lr": "0.003",
        "--warmup-updates": str(max(1, updates // 10)),
        "--max-update": str(updates),
        "--batch-size": "4",
        "--num-workers": "0",
        "--seed": "1",
        "--cpu": None,
        "--no-epoch-checkpoints": None,
        "--validate-interval-updates": "100",
        "--save-interval-updates": "100",
        "--keep-interval-updates": "1",
        "--log-format": "json",
        "--log-interval": "20",
    }


PROMPTS = (
    "Return True if",
    "Raise an error if",
    "This function",
    "The user",
    "Note that",
)


def as_arguments(flags: dict[str, str | None]) -> list[str]:
    """A table of flags as a list of arguments; None is a flag without a value."""
    return [part for flag, value in flags.items() for part in ([flag] if value is None else [flag, value])]
