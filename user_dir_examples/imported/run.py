#!/usr/bin/env python3
"""Windows for models that are there: how much of the loss comes back when a model is fine-tuned through them.

    python user_dir_examples/imported/run.py --texts TEXTS --out runs/imported --updates 3000

TEXTS has the folders train, valid and test. A tiny Llama, trained by transformers, and a vanilla_lm are imported with
windows and fine-tuned on a tenth of the tokens; a retina_lm of the same windows is trained on all of them. The same
command goes on with what was interrupted. ``--transformers FOLDER`` names where transformers lies, if it lies apart.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
LENGTH, ROWS = 2048, 2
SIZES = {"decoder_embed_dim": 64, "decoder_ffn_embed_dim": 256, "decoder_attention_heads": 4}
# A quarter of the cache: (2 * 8 + 2 * 1016) / (4 * 2048).
WINDOWS = "1x=0:8*2,1x=0:1016*2"
LLAMA = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}


def llama(folder: Path, texts: Path, updates: int, seed: int) -> None:
    """Train a tokenizer and a Llama on the training texts, and save both."""
    sys.modules["torchaudio"] = None  # type: ignore[assignment]
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    files = sorted(map(str, texts.joinpath("train").rglob("*.txt")))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(files, vocab_size=LLAMA["vocab_size"], show_progress=False)
    newline, tokens = tokenizer.token_to_id("\u010a"), list[int]()
    for file in files:
        for line in tokenizer.encode_batch(Path(file).read_text(encoding="utf-8").split("\n")):
            tokens += [*line.ids, newline]
    text = torch.tensor(tokens)
    torch.manual_seed(seed)
    special = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": LENGTH}
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, **special))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, (0.9, 0.95), weight_decay=0.0)
    rate = lambda n: min((n + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * n / updates))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for _ in range(updates):
        starts = torch.randint(len(text) - LENGTH, (ROWS,)).tolist()
        rows = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def ran(done: Path, *command: object, env: dict[str, str] | None = None) -> None:
    """Run ``fairseq-ms`` or another command, unless what it makes is there."""
    if not done.exists():
        words = [str(word) for word in command]
        program = [sys.executable, "-m", "fairseq_ms"] if words[0] == "fairseq-ms" else words[:1]
        done.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([*program, *words[1:]], check=True, env={**os.environ, **(env or {})})


def trained(folder: Path, config: object, data: Path, updates: int, seed: int, *settings: str) -> Path:
    """The checkpoint of a run of ``fairseq-ms train``."""
    best = folder / "checkpoint_best.pt"
    own = [f"checkpoint.save_dir={folder}", f"common.seed={seed}", "common.cpu=true", "dataset.num_workers=0"]
    ran(best, "fairseq-ms", "train", config, "--data", data, "--max-update", updates, *own, *settings)
    return best


def loss(checkpoint: Path, data: Path) -> float:
    """Nats a token of the test text, in windows as long as rows."""
    out = checkpoint.with_suffix(".json")
    window = ["--tokens-per-sample", LENGTH, "--context-window", 0]
    ran(out, "fairseq-ms", "perplexity", checkpoint, "--data", data, "--cpu", *window, "--json", out)
    return math.log(json.loads(out.read_text())["perplexity"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder with train, valid and test")
    parser.add_argument("--out", type=Path, required=True, help="folder of all that is made")
    parser.add_argument("--updates", type=int, default=3000, help=f"of {ROWS * LENGTH} tokens (default: 3000)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--transformers", default="", help="folder that transformers lies in")
    parser.add_argument("--llama", type=int, metavar="SEED", help="only train the Llama of this seed")
    args = parser.parse_args()
    out, updates, few = args.out.absolute(), args.updates, max(1, args.updates // 10)
    if args.llama is not None:
        llama(out / f"llama_{args.llama}", args.texts, updates, args.llama)
        return
    sizes = [f"model.{name}={value}" for name, value in SIZES.items()]
    header = ("source", "seed", "before", "windows", "fine-tuned", "retina of all tokens")
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for seed in args.seeds:
        theirs = out / f"llama_{seed}"
        again = [sys.executable, __file__, "--texts", args.texts, "--out", out, "--updates", updates, "--llama", seed]
        beside = os.pathsep.join(filter(None, [args.transformers, os.environ.get("PYTHONPATH", "")]))
        ran(theirs / "tokenizer.json", *again, env={"PYTHONPATH": beside})
        whole = out / f"llama_{seed}_whole"
        ran(whole / "checkpoint.pt", "fairseq-ms", "import", theirs, whole)
        prepared = out / f"data_{seed}"
        how = ["--bpe", "hf_byte_bpe", "--vocab-from", whole, "--quiet"]
        ran(prepared / "bin", "fairseq-ms", "prepare", "text", "--input", args.texts, "--out", prepared, *how)
        data = prepared / "bin"
        vanilla = trained(out / f"vanilla_{seed}", "vanilla_lm_long_2048", data, updates, seed, *sizes)
        windows = f"model.scale_windows='{WINDOWS}'"
        retina = trained(out / f"retina_{seed}", "retina_lm_long_2048", data, updates, seed, *sizes, windows)
        for name, source, before in (("vanilla_lm", vanilla, vanilla), ("Llama", theirs, whole / "checkpoint.pt")):
            narrow = out / f"{name}_{seed}_windows"
            ran(narrow / "checkpoint.pt", "fairseq-ms", "import", source, narrow, "--scale-windows", WINDOWS)
            rate = ["optimization.lr=[0.001]", f"lr_scheduler.warmup_updates={min(50, few // 3)}"]
            tuned = trained(out / f"{name}_{seed}_tuned", narrow / "finetune.yaml", data, few, seed, *rate)
            found = [loss(path, data) for path in (before, narrow / "checkpoint.pt", tuned, retina)]
            print(f"| {name} | {seed} | {' | '.join(f'{value:.3f}' for value in found)} |", flush=True)


if __name__ == "__main__":
    main()
