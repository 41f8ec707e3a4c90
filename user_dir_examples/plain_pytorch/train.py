"""Train a model of fairseq_ms.core on a text in a plain PyTorch loop, without fairseq.

    python train.py book.txt --model Retina --set dim=132 ffn_dim=528 heads=12 layers=4 --steps 1000
    torchrun --nproc-per-node 2 train.py book.txt ...   # shards parameters, gradients and optimizer with fully_shard

DATA is a text, read as bytes, or the prefix of fairseq's binarised data (data-bin/train of train.bin and train.idx).
--set takes any field of the model's configuration as JSON, scales='[{"factor": 1, "layers": 3}]' for instance.
Called again with the same --out, training continues, on any number of processes. --muon-lr: matrices by Muon.
"""

import argparse
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from tqdm import tqdm

from fairseq_ms import core

NUMBERS = {"steps": 500, "rows": 8, "length": 256, "lr": 1e-3, "save-every": 100, "muon-lr": 0.0}
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def read_tokens(data: str) -> np.ndarray:
    """The tokens of a text (bytes) or of fairseq's binarised data, memory-mapped."""
    index, file = Path(f"{data}.idx"), Path(data)
    dtype: type = np.uint8
    if index.is_file():
        file = Path(f"{data}.bin")
        with index.open("rb") as opened:
            header = opened.read(18)  # magic, version, and the code of the type
        if len(header) < 18 or not header.startswith(b"MMIDIDX\x00\x00") or header[17] not in DTYPES:
            raise SystemExit(f"DATA must be binarised with --dataset-impl mmap: {index} is not")
        dtype = DTYPES[header[17]]
    if not file.is_file():
        raise SystemExit(f"DATA must be a text file or the prefix of a .bin and an .idx file: got {data}")
    if not file.stat().st_size:
        raise SystemExit(f"DATA must have tokens: {file} is empty")
    return np.memmap(file, dtype, mode="r")


def batch_of(tokens: np.ndarray, rows: int, length: int, step: int, rank: int, ranks: int) -> list[torch.Tensor]:
    """This rank's share of the rows of a step, tokens and targets (rows / ranks, length); a step always draws them."""
    starts = np.random.default_rng(step).integers(0, len(tokens) - length, rows)[rank::ranks]
    windows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    return [torch.from_numpy(windows[:, :-1]), torch.from_numpy(windows[:, 1:])]


def state_of(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> dict:
    weights, moments = get_state_dict(model, optimizers)
    return {"model": weights, "optimizer": moments, "step": torch.tensor(step)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("--model", default="Vanilla", choices=[n for n in core.__all__ if hasattr(core, f"{n}Config")])
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=JSON", help="fields of the configuration")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"(default: {default})")
    parser.add_argument("--out", type=Path, default=Path("runs/plain"), help="folder (default: runs/plain)")
    args = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    tokens, checkpoint = read_tokens(args.data), args.out / "checkpoint"
    if not 0 < args.length < len(tokens) or args.rows < 1 or args.rows % ranks:
        raise SystemExit(f"--length must be 1 to {len(tokens) - 1}, and --rows a multiple of {ranks} processes")
    settings = {"vocab_size": int(tokens.max()) + 1, "max_positions": args.length}
    torch.manual_seed(0)
    try:
        settings |= {name: json.loads(value) for name, _, value in (item.partition("=") for item in args.set)}
        model = getattr(core, args.model)(getattr(core, f"{args.model}Config").from_dict(settings)).to(device)
    except (TypeError, ValueError) as error:
        raise SystemExit(f"--set must be FIELD=JSON of a {args.model}Config: {error}") from None
    if ranks > 1:
        register_fsdp_forward_method(fully_shard(model), "loss")
    matrices, others = core.matrices_and_others(model) if args.muon_lr else ([], list(model.parameters()))
    optimizers: list = [torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.01)] if matrices else []
    optimizers.append(torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01))
    if (saved := state_of(model, optimizers, 0)) and checkpoint.is_dir():
        try:
            dcp.load(saved, checkpoint_id=checkpoint)
        except dcp.CheckpointException:
            raise SystemExit(f"--out must be a new folder: {checkpoint} is of another model or other sizes") from None
        set_state_dict(model, optimizers, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    done = int(saved["step"])
    for step in (bar := tqdm(range(done, args.steps), initial=done, total=args.steps, disable=rank > 0)):
        rate = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        loss = model.loss(*(part.to(device) for part in batch_of(tokens, args.rows, args.length, step, rank, ranks)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * rate
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(mean)
        bar.set_postfix(loss=f"{float(mean):.4f}")
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            dcp.save(state_of(model, optimizers, step + 1), checkpoint_id=args.out / "unfinished")
            if rank == 0:
                shutil.rmtree(checkpoint, ignore_errors=True)  # which stayed until this one was complete
                (args.out / "unfinished").rename(checkpoint)
                print(f"update {step + 1}: loss {float(mean):.7f}")
    if ranks > 1:
        dist.destroy_process_group()
    elif tokens.dtype == np.uint8:
        prompt = torch.tensor(tokens[: min(32, (args.length + 1) // 2)].tolist(), device=device)
        text = model.generate(prompt, min(200, args.length + 1 - len(prompt)), temperature=0.8)
        print(bytes(text.tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
