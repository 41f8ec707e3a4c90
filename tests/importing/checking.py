"""Imported models that were exported, as transformers has them: python checking.py FOLDER NAME..., where no fairseq is.

It prints a line of JSON for each: how far logits are from those of the source, and the text that it writes.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# First, so that there is no fairseq.
import tests.export.checking  # noqa: F401


@torch.no_grad()
def found(folder: Path) -> dict:
    model = AutoModelForCausalLM.from_pretrained(folder / "exported", trust_remote_code=True).float()
    expected = torch.load(folder / "expected.pt", weights_only=True)
    logits = [
        (model(case["tokens"]).logits.log_softmax(-1)[..., expected["symbols"]] - case["log_probs"]).abs().max()
        for case in expected["cases"]
    ]
    text = None
    if "prompt" in expected:
        tokenizer = AutoTokenizer.from_pretrained(folder / "exported", trust_remote_code=True)
        inputs = tokenizer([expected["prompt"]], return_tensors="pt")
        written = model.generate(**inputs, do_sample=False, max_new_tokens=expected["written"])
        text = tokenizer.batch_decode(written, skip_special_tokens=True)[0]
    return {"log_probs": float(max(logits)), "text": text}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        print(json.dumps({"name": name, **found(Path(sys.argv[1]) / name)}))
