#!/usr/bin/env python3
"""Other libraries' models on the data of docs/recipes.md: same rows, batches, updates and schedule, in a plain loop.

    python user_dir_examples/claims/others.py runs/claims --only gpt2 llama
    python user_dir_examples/claims/others.py runs/claims --table

RUNS is where driver.py has prepared `some_subwords`. Every model is trained with Adam by one thread, and appends one
line to RUNS/others.jsonl, unless it has one. gpt2 and llama need `transformers`, x_transformers needs `x-transformers`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from fairseq import tasks
from torch import Tensor, nn
from torch.nn import functional as F

import corpora
from fairseq_ms import core
from fairseq_ms.analysis import untrained

LENGTH, ROWS, DIM, FFN, HEADS, LAYERS, PADDING = 512, 4, 128, 512, 4, 6, 1
Model = tuple[nn.Module, Callable[[Tensor], Tensor]]
# A torchaudio built for another torch, which transformers would import.
sys.modules["torchaudio"] = None  # type: ignore[assignment]


def fairseq_transformer(vocabulary: int, learned: bool = True) -> Model:
    """fairseq's transformer_lm, pre-LN as the others, with its own deviations and its factor on embeddings."""
    flags = f"--arch transformer_lm --decoder-embed-dim {DIM} --decoder-ffn-embed-dim {FFN} --decoder-layers {LAYERS} "
    flags += f"--decoder-attention-heads {HEADS} --decoder-input-dim {DIM} --decoder-output-dim {DIM} "
    flags += "--share-decoder-input-output-embed --decoder-normalize-before "
    flags += f"--activation-fn gelu --dropout 0 --attention-dropout 0 --tokens-per-sample {LENGTH}"
    model, _ = untrained.build((flags + " --decoder-learned-pos" * learned).split(), vocabulary)
    return model, lambda tokens: model(tokens)[0]


def gpt2(vocabulary: int) -> Model:
    """Hugging Face's GPT-2, with learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": LENGTH, "n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS, "n_inner": FFN}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=vocabulary, **sizes, **none)
    return _hugging_face(GPT2LMHeadModel(config))


def llama(vocabulary: int) -> Model:
    """Hugging Face's Llama: rotary positions, RMS norm, SwiGLU of equal parameters, no biases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=DIM,
        intermediate_size=2 * FFN // 3 // 8 * 8 + 8,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    return _hugging_face(LlamaForCausalLM(config))


def _hugging_face(model: nn.Module) -> Model:
    nn.init.normal_(model.get_input_embeddings().weight, std=0.1)  # type: ignore[operator]
    return model, lambda tokens: model(tokens, use_cache=False).logits


def x_transformers(vocabulary: int) -> Model:
    """x-transformers' decoder with rotary positions over the whole head."""
    from x_transformers import Decoder, TransformerWrapper

    rotary = {"rotary_pos_emb": True, "rotary_emb_dim": DIM // HEADS}
    layers = Decoder(dim=DIM, depth=LAYERS, heads=HEADS, attn_dim_head=DIM // HEADS, attn_flash=True, **rotary)
    model = TransformerWrapper(
        num_tokens=vocabulary, max_seq_len=LENGTH, attn_layers=layers, use_abs_pos_emb=False, tie_embedding=True
    )
    nn.init.normal_(model.token_emb.emb.weight, std=0.1)
    return model, model


def vanilla(vocabulary: int) -> Model:
    """Ours, rotary, in this loop: what the loop itself changes."""
    sizes = core.VanillaConfig(
        vocab_size=vocabulary,
        dim=DIM,
        ffn_dim=FFN,
        heads=HEADS,
        layers=LAYERS,
        positions="rotary",
        embedding_init_std=0.1,
        dropout=0.0,
        attention_dropout=0.0,
    )
    model = core.Vanilla(sizes)
    return model, lambda tokens: model(tokens)[0]


MODELS: dict[str, tuple[str, Callable[[int], Model]]] = {
    "fairseq": ("fairseq `transformer_lm`, learned positions", fairseq_transformer),
    "fairseq_sinusoidal": ("the same, sinusoidal positions", lambda size: fairseq_transformer(size, learned=False)),
    "gpt2": ("Hugging Face GPT-2", gpt2),
    "llama": ("Hugging Face Llama", llama),
    "x_transformers": ("x-transformers, rotary positions", x_transformers),
    "vanilla": ("`vanilla_lm`, rotary positions", vanilla),
}


def rows(task: tasks.FairseqTask, split: str, shuffle: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets (B, T) of one epoch, in the batches and the order of `fairseq-train --seed 1`."""
    batches = task.get_batch_iterator(task.dataset(split), max_sentences=ROWS, seed=1, epoch=1)
    for batch in batches.next_epoch_itr(shuffle=shuffle):
        yield batch["net_input"]["src_tokens"], batch["target"]


def loss_of(logits: Callable[[Tensor], Tensor], tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats; padding does not count."""
    flat = logits(tokens).flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=PADDING, reduction=reduction)


def train(name: str, runs: Path, rate: float, most_updates: int | None) -> dict[str, object]:
    """Train one model for an epoch; its record."""
    data = runs / "data" / "some_subwords" / "bin"
    cfg = untrained.parse(["--arch", "transformer_lm", "--tokens-per-sample", str(LENGTH)])
    cfg.task.data = str(data)
    task = tasks.setup_task(cfg.task)
    for split in ("train", "valid"):
        task.load_dataset(split)
    updates = min(corpora.targets(data) // (ROWS * LENGTH), most_updates or 10**9)
    warm_up = max(1, updates // 20)
    torch.manual_seed(1)
    model, logits = MODELS[name][1](len(task.source_dictionary))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    model.train()
    seconds = 0.0
    for update, (tokens, targets) in enumerate(itertools.islice(rows(task, "train", True), updates)):
        begin, done = time.process_time(), (update - warm_up) / (updates - warm_up)
        optimizer.param_groups[0]["lr"] = rate * min(update / warm_up, 0.5 * (1 + math.cos(math.pi * max(0.0, done))))
        loss_of(logits, tokens, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.process_time() - begin
    model.eval()
    with torch.no_grad():
        held_out = list(rows(task, "valid", False))
        nats = sum(float(loss_of(logits, *pair, "sum")) for pair in held_out)
    nats /= sum(int((targets != PADDING).sum()) for _, targets in held_out)
    return {
        "model": name,
        "rate": rate,
        "updates": updates,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "valid_perplexity": round(math.exp(nats), 2),
        "milliseconds_a_token": round(1000 * seconds / (updates * ROWS * LENGTH), 3),
    }


def table(records: list[dict[str, object]]) -> str:
    """A row a model, in Markdown."""
    lines = ["| model | rate | validation | parameters | ms a token |", "| --- | --- | --- | --- | --- |"]
    for record in sorted(records, key=lambda record: list(MODELS).index(str(record["model"]))):
        title, size = MODELS[str(record["model"])][0], int(str(record["parameters"])) / 1e6
        figures = f"{record['rate']} | {record['valid_perplexity']:.1f} | {size:.2f} M"
        lines.append(f"| {title} | {figures} | {record['milliseconds_a_token']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of driver.py's data and of others.jsonl")
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS), help="these (default: all)")
    parser.add_argument("--lr", type=float, default=0.006, help="rate of Adam (default: 0.006)")
    parser.add_argument("--max-updates", type=int, metavar="N", help="stop there; to try the script")
    parser.add_argument("--table", action="store_true", help="print what others.jsonl has, and train nothing")
    args = parser.parse_args()
    results = args.runs / "others.jsonl"
    records = [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.is_file() else []
    torch.set_num_threads(1)
    for name in [] if args.table else args.only:
        if any((record["model"], record["rate"]) == (name, args.lr) for record in records):
            continue
        records.append(train(name, args.runs, args.lr, args.max_updates))
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(records[-1]) + "\n")
    print(table(records))


if __name__ == "__main__":
    main()
