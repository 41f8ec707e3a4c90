"""Tiny random models of transformers, as it saves them, and what they say: python making.py FOLDER, beside fairseq_ms.

Every case is a folder NAME with a file NAME.pt of logits and losses at several lengths; those with a tokenizer have a
text that is written on with the most probable tokens, too.
"""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
sys.modules["torchaudio"] = None  # type: ignore[assignment]
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

from tests.importing.cases import CASES, GROUPED, LENGTHS, OF_TEXTS, PROMPT, WRITTEN  # noqa: E402

LEARNT = ["She said: it's done, isn't it?", "the cat sat on the mat", "a naïve café"] * 4
WORDS = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"


def config_of(kind: str, settings: dict):
    settings, base = dict(settings), settings.get("rope_theta")
    if base is not None and int(transformers.__version__.split(".")[0]) >= 5:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    return getattr(transformers, f"{kind}Config")(**settings)


def tokenizer_of(kind: str) -> tokenizers.Tokenizer:
    """One that has learnt a little."""
    found = tokenizers.Tokenizer(models.BPE(byte_fallback=kind == "byte_fallback", unk_token=None))
    special, alphabet = ["<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet()
    if kind == "byte_fallback":
        special, alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))], []
        found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "split":
        words = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
        found.normalizer = normalizers.NFC()
        found.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    else:
        found.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(LEARNT, trainer)
    if kind == "byte_fallback":
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        found.decoder = decoders.Sequence(parts)
        found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        # Bytes are in the vocabulary, and nothing that a text may spell.
        plain = json.loads(found.to_str())
        plain["added_tokens"] = plain["added_tokens"][:3]
        found = tokenizers.Tokenizer.from_str(json.dumps(plain))
    else:
        found.decoder = decoders.ByteLevel()
    return found


def text_of(model: Any, folder: Path, kind: str) -> dict:
    """What it writes, as a plain loop over whole passes has it; a text begins with <s>, or else a new line."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(kind))
    tokenizer.save_pretrained(folder)
    tokens = tokenizer(PROMPT if kind == "byte_fallback" else "\n" + PROMPT).input_ids
    for _ in range(WRITTEN):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return {"tokens": tokens, "text": tokenizer.decode(tokens[1:], skip_special_tokens=False)}


@torch.no_grad()
def make(folder: Path, name: str, kind: str, settings: dict, tokenizer: str = "") -> None:
    torch.manual_seed(len(name))
    if tokenizer:
        settings = {**settings, "vocab_size": tokenizer_of(tokenizer).get_vocab_size() + 3}
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, settings)).eval()
    for parameter in model.parameters():
        gain = 1.0 if parameter.dim() == 1 else 0.0
        parameter.copy_(gain + (0.6 if tokenizer and gain == 0 else 0.2) * torch.randn_like(parameter))
    if name.endswith("bf16"):
        model.bfloat16()
    # In several files, for some.
    model.save_pretrained(folder / name, max_shard_size="5KB" if kind == "Llama" else "1GB")
    if name.endswith("bf16"):
        # Rounded buffers are not of the files.
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
    found: dict[Any, dict] = {}
    for length in LENGTHS:
        tokens = torch.randint(29, (2, length), generator=torch.Generator().manual_seed(length))
        output = model(tokens, labels=tokens)
        found[length] = {"tokens": tokens, "logits": output.logits, "loss": output.loss}
    if tokenizer:
        found["text"] = text_of(model, folder / name, tokenizer)
    torch.save(found, folder / f"{name}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    every: dict[str, tuple[Any, ...]] = {**CASES, **GROUPED, **OF_TEXTS}
    for name, given in every.items():
        make(Path(sys.argv[1]), name, *given)
    print(transformers.__version__)
