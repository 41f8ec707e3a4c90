"""Train any model of fairseq_ms.core in a plain PyTorch loop, without fairseq.

    python train.py book.txt --model Retina --steps 1000
    torchrun --nproc-per-node 2 train.py book.txt ...   # shards parameters, gradients and optimizer with fully_shard

DATA is a text, read as bytes, or the prefix of the data that fairseq-ms prepare wrote (data/bin/train); what is
validated on is its last twentieth, or data/bin/valid. --set takes any field of the model's configuration as JSON:
dim=132, scales='[{"factor": 1, "layers": 3}]'; without a GPU, models are small otherwise. Matrices are trained by Muon,
all else by AdamW; a GPU trains compiled layers in bfloat16. Models with a memory read on where the last batch ended.
The same command continues a training, on any number of processes. OUT/checkpoint.pt is what fairseq-ms sample,
perplexity and export take; torch.load has the model's class as "name", sizes as "configuration", weights as "model".
"""

import argparse
import json
import math
import os
import shlex
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from tqdm import tqdm

from fairseq_ms import core
from fairseq_ms.errors import UsageError
from fairseq_ms.tools import plain, tokenizing, whole_files
from fairseq_ms.tools.lock import FolderLock
from fairseq_ms_pipeline import indexed

NUMBERS = {"steps": 500, "rows": 8, "length": 256, "lr": 3e-3, "muon-lr": 0.02, "save-every": 100, "valid-batches": 10}
SMALL = {"dim": 192, "ffn_dim": 768, "heads": 6, "layers": 4}
LINE = 5  # seconds between lines where no bar is drawn
OUT = FolderLock()
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def read_data(data: str) -> np.ndarray:
    """The tokens of a text (bytes) or of binarised data, memory-mapped."""
    file = Path(data)
    try:
        if Path(f"{data}.idx").is_file():
            return indexed.read_tokens(file)
        if not file.is_file():
            raise ValueError(f"there is no text {file}, and no {file}.idx")
        if not file.stat().st_size:
            raise ValueError(f"{file} is empty")
    except (ValueError, OSError) as error:
        raise SystemExit(f"DATA must be a text or the prefix of binarised data, as DATA/train: {error}") from None
    return np.memmap(file, np.uint8, mode="r")


def starts_of(count: int, args: argparse.Namespace, step: int, streams: bool) -> tuple[np.ndarray, bool]:
    """Where the rows of a step begin among so many tokens, always the same; and whether they begin streams anew.

    At random, or in streams, of which every row reads its part of the tokens from the beginning to the end.
    """
    if not streams:
        return np.random.default_rng(step).integers(0, count - args.length, args.rows), True
    part = (count - 1) // args.rows
    turn = step % max(1, part // args.length)
    return np.arange(args.rows) * part + turn * args.length, turn == 0


def placed(batch: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A batch on its device; the copy to a GPU is from pinned memory, for which nothing here waits."""
    return batch if device.type == "cpu" else batch.pin_memory().to(device, non_blocking=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("--model", default="Vanilla", choices=[n for n in core.__all__ if hasattr(core, f"{n}Config")])
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=JSON", help="fields of the configuration")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"(default: {default})")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--out", type=Path, default=Path("runs/plain"), help="folder (default: runs/plain)")
    args = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before NCCL makes its communicators on the current one
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train, place, is_text = read_data(args.data), Path(args.data).absolute(), not Path(f"{args.data}.idx").is_file()
    try:
        kept = tokenizing.kept(place if is_text else place.parent)
    except (ValueError, OSError) as error:
        raise SystemExit(f"DATA must lie beside their dictionary: {error}") from None
    checksum = zlib.crc32(train.data)
    held_out = len(train) // 20 if len(train) >= 20 * (args.rows * args.length + 1) and is_text else 0  # or too few
    train, valid = np.split(train, [len(train) - held_out])
    if not is_text and place.with_name("valid.idx").is_file():
        valid = read_data(str(place.with_name("valid")))
    if not 0 < args.length < len(train) or args.rows < 1 or args.rows % ranks:
        raise SystemExit(f"--length must be 1 to {len(train) - 1}, and --rows a multiple of {ranks} processes")
    settings = {"vocab_size": len(kept["symbols"]), "max_positions": args.length}
    fields = getattr(core, f"{args.model}Config").__dataclass_fields__
    settings |= {name: size for name, size in SMALL.items() if name in fields and device.type == "cpu"}
    torch.manual_seed(0)
    try:
        settings |= {name: json.loads(value) for name, _, value in (item.partition("=") for item in args.set)}
        model = plain.built(args.model, settings).to(device)
        if args.compile:
            model.compile()
    except (TypeError, ValueError) as error:
        raise SystemExit(f"--set must be FIELD=JSON of a {args.model}Config: {error}") from None
    streams, count, mesh = hasattr(model, "new_memory"), args.rows // ranks, None
    own = slice(rank * count, (rank + 1) * count)
    state: Any = model.new_state(count) if streams else None
    fresh: Any = state.memory if streams else None  # zeros, made before the weights are split
    if streams and (args.length % model.segment_len or len(train) <= args.rows * args.length):
        raise SystemExit(f"--length must be a multiple of segment_len {model.segment_len}, and DATA have all --rows")
    if ranks > 1:
        mesh = init_device_mesh(device.type, (ranks,))
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "loss")
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.98), weight_decay=0.01)
    if args.muon_lr:
        optimizer = core.muon_and_adamw(model, args.muon_lr, args.lr, 0.01, (0.9, 0.98))
    described = {"name": args.model, "configuration": model.config.to_dict(), "tokenizer": kept}
    described |= {"length": args.length, "data": str(place if is_text else place.parent), "held_out": held_out}
    rates = [group["lr"] for group in optimizer.param_groups]
    folder, file = args.out / "checkpoint", args.out / "checkpoint.pt"

    def everything(step: int, options: StateDictOptions | None = None) -> dict:
        weights, moments = get_state_dict(model, optimizer, options=options)
        memory = dict(state.memory.states) if streams else {}
        if mesh is not None:
            memory = {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in memory.items()}
            memory = {name: part.full_tensor().cpu() if options else part for name, part in memory.items()}
        numbers = {"step": torch.tensor(step), "checksum": torch.tensor(checksum)}
        return {"model": weights, "optimizer": moments, "memory": memory, **numbers}

    def write(step: int, last: bool) -> None:
        """A process alone writes one file; several write a folder of their parts, and one file at the end."""
        args.out.mkdir(parents=True, exist_ok=True)
        try:
            if ranks > 1:
                dcp.save(everything(step), checkpoint_id=args.out / "unfinished")
                if rank == 0:
                    (args.out / "unfinished" / "configuration.json").write_text(json.dumps(described["configuration"]))
                    whole_files.write_checksums(args.out / "unfinished")
                    shutil.rmtree(folder, ignore_errors=True)  # which stayed until this one was complete
                    (args.out / "unfinished").rename(folder)
            if ranks == 1 or last:
                saved = everything(step, WHOLE if ranks > 1 else None)
                if rank == 0:
                    whole_files.write(str(file), lambda opened: torch.save({**saved, **described}, opened), "--out")
                    shutil.rmtree(folder, ignore_errors=True)
        except UsageError as error:
            raise SystemExit(str(error)) from None
        except (dcp.CheckpointException, OSError) as error:
            raise SystemExit(whole_files.unwritten(folder, error, "--out")) from None

    saved, options, then = None, None, {}
    try:
        if rank == 0:
            OUT.take(args.out, "--out")
        if folder.is_dir() and not (file.is_file() and file.stat().st_mtime > folder.stat().st_mtime):
            whole_files.check_folder(folder)
            dcp.load(saved := everything(0), checkpoint_id=folder)
            if (folder / "configuration.json").is_file():
                then = json.loads((folder / "configuration.json").read_text())
        elif file.is_file():
            whole_files.check(str(file))
            saved, options = torch.load(file, map_location=device, weights_only=True), WHOLE
            then = saved["configuration"]
            saved["memory"] = {name: part[own] for name, part in saved["memory"].items()}
        if saved is not None:
            if int(saved.get("checksum", checksum)) != checksum:
                raise KeyError(args.data)
            plain.check_unchanged(then, described["configuration"], args.out)
            moments = {"optim_state_dict": saved["optimizer"], "options": options}
            set_state_dict(model, optimizer, model_state_dict=saved["model"], **moments)
    except UsageError as error:
        raise SystemExit(str(error)) from None
    except (dcp.CheckpointException, RuntimeError, KeyError):
        raise SystemExit(f"--out must be a new folder: {args.out} is of another model, other sizes or data") from None
    done = int(saved["step"]) if saved is not None else 0
    if state is not None and saved is not None:
        parts = {name: part.to_local() if mesh and not options else part for name, part in saved["memory"].items()}
        state.restart(type(fresh)(parts, fresh.pending_BT), done * args.length)

    def tokens_of(rows: np.ndarray) -> torch.Tensor:
        """Bytes, as ``kept`` numbers them, or tokens."""
        tokens = torch.from_numpy(rows.astype(np.int64))
        return torch.where(tokens == 10, 2, tokens + 4) if is_text else tokens

    def loss_of(tokens: np.ndarray, step: int, state: Any, in_streams: bool) -> torch.Tensor:
        """This rank's part of a step's loss."""
        starts, begins = starts_of(len(tokens), args, step, in_streams)
        if state is not None and begins:
            state.restart(fresh, 0)
        rows = np.stack([tokens[start : start + args.length + 1] for start in starts[own]])
        batch = placed(tokens_of(rows), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            return model.loss(batch[:, :-1], batch[:, 1:], **({} if state is None else {"state": state}))

    def mean_of(loss: torch.Tensor) -> float:
        mean = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(mean)
        return float(mean)

    def validated() -> str:
        steps = range(min(args.valid_batches, (len(valid) - 1) // args.rows // args.length))
        model.eval()
        reading = state.copy() if streams else None
        with torch.no_grad():
            losses = [mean_of(loss_of(valid, step, reading, True)) for step in steps]
        model.train()
        return f", validated {sum(losses) / len(losses):.7f}" if losses else ""

    parameters = sum(parameter.numel() for parameter in model.parameters())
    update, passes = args.rows * args.length, args.steps * args.rows * args.length / len(train)
    where = f"{ranks} x {device.type}" if ranks > 1 else device.type
    if rank == 0:
        print(
            f"{args.model}: {parameters:,} parameters on {where}, {update:,} tokens an update; "
            f"{args.steps:,} updates are {passes:.1f} passes over {len(train):,} tokens; they are saved in {args.out}",
            flush=True,
        )
    began = shown = time.monotonic()
    for step in (
        bar := tqdm(range(done, args.steps), initial=done, total=args.steps, disable=None if rank == 0 else True)
    ):
        factor = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        torch.manual_seed(step * ranks + rank)  # dropout, so that a run that is resumed draws the same
        loss = loss_of(train, step, state, streams)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:  # not after every update: it waits for the GPU
            bar.set_postfix(loss=f"{(mean := mean_of(loss)):.4f}")
            if rank == 0 and bar.disable and time.monotonic() - shown > LINE:
                left = (time.monotonic() - began) / (step + 1 - done) * (args.steps - step - 1) / 60
                shown = time.monotonic()
                print(f"update {step + 1:,} of {args.steps:,}: loss {mean:.4f}, {left:.1f} min left", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            write(step + 1, step + 1 == args.steps)
            line = f"update {step + 1}: loss {mean_of(loss):.7f}{validated()}"
            if rank == 0:
                tqdm.write(line)
    if ranks > 1:
        dist.destroy_process_group()
        return
    takes = "the model" if args.model == "CoarseLM" else "what fairseq-ms sample, perplexity and export take"
    print(f"{file} is {takes}")
    if args.model != "CoarseLM":
        print(f"next: fairseq-ms sample {shlex.quote(str(file))} --prompt TEXT")


if __name__ == "__main__":
    try:
        main()
    finally:
        OUT.release()
