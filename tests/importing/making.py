"""Tiny random models of transformers, as it saves them, and what they say: python making.py FOLDER, beside fairseq_ms.

Every case is a folder NAME with a file NAME.pt of logits and losses at several lengths.
"""

import logging
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
sys.modules["torchaudio"] = None  # type: ignore[assignment]
import torch  # noqa: E402
import transformers  # noqa: E402

from tests.importing.cases import CASES, GROUPED, LENGTHS  # noqa: E402


def config_of(kind: str, settings: dict):
    settings, base = dict(settings), settings.get("rope_theta")
    if base is not None and int(transformers.__version__.split(".")[0]) >= 5:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    return getattr(transformers, f"{kind}Config")(**settings)


@torch.no_grad()
def make(folder: Path, name: str, kind: str, settings: dict) -> None:
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, settings)).eval()
    for parameter in model.parameters():
        gain = 1.0 if parameter.dim() == 1 else 0.0
        parameter.copy_(gain + 0.2 * torch.randn_like(parameter))
    if name.endswith("bf16"):
        model.bfloat16()
    # In several files, for some.
    model.save_pretrained(folder / name, max_shard_size="5KB" if kind == "Llama" else "1GB")
    if name.endswith("bf16"):
        # Rounded buffers are not of the files.
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
    found = {}
    for length in LENGTHS:
        tokens = torch.randint(29, (2, length), generator=torch.Generator().manual_seed(length))
        output = model(tokens, labels=tokens)
        found[length] = {"tokens": tokens, "logits": output.logits, "loss": output.loss}
    torch.save(found, folder / f"{name}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (kind, settings) in {**CASES, **GROUPED}.items():
        make(Path(sys.argv[1]), name, kind, settings)
    print(transformers.__version__)
