#!/usr/bin/env python3
"""Other libraries' models on the data of the part `recipes`: the same rows, updates and schedule, in a plain loop.

    python user_dir_examples/claims/others.py runs/claims

RUNS is where driver.py has prepared `some_subwords`. Every model is trained with Adam by one thread, and appends one
line to RUNS/others.jsonl, unless it has one. The packages `transformers` and `x-transformers` are needed.
"""

from __future__ import annotations

import argparse
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
from fairseq_ms.tools import untrained

LENGTH, ROWS, DIM, FFN, HEADS, LAYERS, PADDING = 512, 4, 128, 512, 4, 6, 1
FLAGS = (
    f"--arch transformer_lm --decoder-embed-dim {DIM} --decoder-input-dim {DIM} --decoder-output-dim {DIM} "
    f"--decoder-ffn-embed-dim {FFN} --decoder-layers {LAYERS} --decoder-attention-heads {HEADS} --activation-fn gelu "
    "--share-decoder-input-output-embed --decoder-normalize-before --decoder-learned-pos --dropout 0 "
    f"--attention-dropout 0 --tokens-per-sample {LENGTH}"
)
Model = tuple[nn.Module, Callable[[Tensor], Tensor]]
# A torchaudio built for another torch, which transformers would import.
sys.modules["torchaudio"] = None  # type: ignore[assignment]


def fairseq_transformer(vocabulary: int) -> Model:
    """fairseq's, with learned positions, its own deviations and its factor on embeddings."""
    model, _ = untrained.build(FLAGS.split(), vocabulary)
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

    sizes = {"hidden_size": DIM, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 344}
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=LENGTH, tie_word_embeddings=True, **sizes)
    return _hugging_face(LlamaForCausalLM(config))


def _hugging_face(model: nn.Module) -> Model:
    nn.init.normal_(model.get_input_embeddings().weight, std=0.1)  # type: ignore[operator]
    return model, lambda tokens: model(tokens, use_cache=False).logits


def x_transformers(vocabulary: int) -> Model:
    """x-transformers' decoder with rotary positions over the whole head."""
    from x_transformers import Decoder, TransformerWrapper

    rotary = {"rotary_pos_emb": True, "rotary_emb_dim": DIM // HEADS}
    layers = Decoder(dim=DIM, depth=LAYERS, heads=HEADS, attn_dim_head=DIM // HEADS, attn_flash=True, **rotary)
    settings = {"use_abs_pos_emb": False, "tie_embedding": True}
    model = TransformerWrapper(num_tokens=vocabulary, max_seq_len=LENGTH, attn_layers=layers, **settings)
    nn.init.normal_(model.token_emb.emb.weight, std=0.1)
    return model, model


MODELS: dict[str, Callable[[int], Model]] = {
    "fairseq's transformer_lm": fairseq_transformer,
    "Hugging Face GPT-2": gpt2,
    "Hugging Face Llama": llama,
    "x-transformers, rotary positions": x_transformers,
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


def train(name: str, runs: Path, rate: float) -> dict[str, object]:
    """Train one model for an epoch; its record."""
    data = runs / "data" / "some_subwords" / "bin"
    cfg = untrained.parse(FLAGS.split())
    cfg.task.data = str(data)
    task = tasks.setup_task(cfg.task)
    for split in ("train", "valid"):
        task.load_dataset(split)
    updates = corpora.targets(data) // (ROWS * LENGTH)
    warm_up = max(1, updates // 20)
    torch.manual_seed(1)
    model, logits = MODELS[name](len(task.source_dictionary))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    seconds = 0.0
    for update, (tokens, targets) in zip(range(updates), rows(task, "train", True)):
        begin, done = time.process_time(), (update - warm_up) / (updates - warm_up)
        optimizer.param_groups[0]["lr"] = rate * min(update / warm_up, 0.5 * (1 + math.cos(math.pi * max(0.0, done))))
        loss = loss_of(logits, tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.process_time() - begin
        if update % 100 == 0:
            print(f"{name}: update {update}, {float(loss.detach()):.2f} nats", flush=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of driver.py's data and of others.jsonl")
    parser.add_argument("--only", default="", metavar="TEXT", help="models with this in their names (default: all)")
    parser.add_argument("--lr", type=float, default=0.006, help="rate of Adam (default: 0.006)")
    args = parser.parse_args()
    results = args.runs / "others.jsonl"
    torch.set_num_threads(1)
    for name in MODELS:
        lines = results.read_text("utf-8").splitlines() if results.is_file() else []
        done = {(record["model"], record["rate"]) for record in map(json.loads, lines)}
        if args.only in name and (name, args.lr) not in done:
            record = train(name, args.runs, args.lr)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(record)


if __name__ == "__main__":
    main()
