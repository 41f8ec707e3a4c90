"""The model card: what was trained on what, how well it does, how it is loaded, and under which licence."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_ms.errors import UsageError
from fairseq_ms_pipeline.files import parsed

if TYPE_CHECKING:
    from fairseq_ms.tools.tokenizing import Pipeline
    from fairseq_ms.tools.trained import Trained

# Numbers of `fairseq-ms perplexity --json` that the card repeats.
_NUMBERS = ("perplexity", "word_perplexity", "bits_per_character", "bits_per_byte", "bits_per_source_byte")

_LOADING = """```
pip install {needed}
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
inputs = tokenizer(["Once upon a time"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=50), skip_special_tokens=True))
```"""
_WITHOUT_PYTHON = """Without the model's Python it is read by fairseq_ms alone:

```
fairseq-ms sample FOLDER --prompt "Once upon a time"
```"""


def text(checkpoint: Trained, pipeline: Pipeline, args: Namespace, config: Mapping[str, Any]) -> str:
    """``README.md`` in the Hub's form; what no checkpoint says of itself comes from the command's flags."""
    parameters = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    needed = " ".join(["torch", "transformers", "safetensors", *pipeline.packages])
    flags = {f"--{name.replace('_', '-')}": value for name, value in config["flags"].items()}
    settings = "\n".join(f"| `{name}` | `{value}` |" for name, value in (flags or config["model"]).items())
    steps = {"moses": "Moses, ", "none": ""}[pipeline.tokenise] + pipeline.level
    most = config["max_position_embeddings"]
    reads = f"at most {most} tokens, the first symbol included" if most else "texts of any length"
    loading = _WITHOUT_PYTHON if args.no_python else _LOADING.format(needed=needed)
    return f"""---
license: {args.license}
library_name: transformers
pipeline_tag: text-generation
tags:
- fairseq_ms
- {config["arch"]}
---

# {checkpoint.label}

A language model of fairseq_ms, `{config["arch"]}`, with {parameters:,} parameters. It reads {reads}.

{loading}

A text begins with `<s>`, which the tokenizer adds, and a line ends in `</s>`, which is decoded as a newline.

## Data

| | |
| --- | --- |
| folder | `{"/".join(Path(str(checkpoint.data)).resolve().parts[-2:])}` |
| symbols | {steps} |
| vocabulary | {config["vocab_size"]:,} |
| licence | {args.data_license} |

## Perplexity

{_perplexities(args.perplexity)}

## Settings

| | |
| --- | --- |
{settings}
"""


def _perplexities(files: Sequence[Path]) -> str:
    if not files:
        return "Not measured."
    rows = ["| data | split | window, stride | measure | value |", "| --- | --- | --- | --- | --- |"]
    for file in files:
        try:
            found = parsed(file.read_text(encoding="utf-8"))
            place = f"{Path(found['data']).name} | {found['subset']} | {found['window']}, {found['stride']}"
            measured = [(name, float(found[name])) for name in _NUMBERS if name in found]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--perplexity must name files of fairseq-ms perplexity --json: got {file}") from error
        rows += [f"| {place} | {name.replace('_', ' ')} | {value:.4f} |" for name, value in measured]
    return "\n".join(rows)
