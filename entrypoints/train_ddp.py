#!/usr/bin/env python3
"""Train with DDP and keep one file, model_latest.pt, as most scripts do: plain PyTorch, with nothing of elastic_ext in it, unless
you give --global-batch.

    torchrun --nproc-per-node=2 train_ddp.py                       # stock torchrun
    python -m elastic_ext.agent --nproc-per-node=2 train_ddp.py    # the same script under elastic_ext

After each epoch rank 0 saves model, optimizer and epoch; each start resumes from there, at any world size. Worth copying:

* The file is written under another name, brought to the disk, and renamed. So it is always whole: a rank that is killed while
  it saves leaves the epoch before.
* Without storage that all nodes reach: --copies=node. One rank of every node saves the same file to that node's own disk. A node
  that is new, or was away for a while, gets the newest copy that any other node has.
* --global-batch: a restart with fewer or more ranks keeps the number of examples per optimizer step, and which ones they are.
* Every epoch draws from generators of its own, so the losses after a resume equal those of an uninterrupted run to the bit.
"""

import argparse
import itertools
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

NAME = "model_latest.pt"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="environment: CHECKPOINT_DIR is the default of --checkpoint-dir")
    add = parser.add_argument
    add("--checkpoint-dir", type=Path, default=Path(os.environ.get("CHECKPOINT_DIR", "checkpoints")))
    add(
        "--copies", choices=("one", "node"), default="one", help="one: on storage that all nodes reach; node: on each node's disk"
    )
    add("--epochs", type=int, default=5)
    add("--batch", type=int, default=32, help="examples per rank and micro-step")
    add(
        "--global-batch",
        type=int,
        default=0,
        help="examples per optimizer step, over all ranks; needs elastic_ext (0: one micro-step of each rank)",
    )
    add("--examples", type=int, default=4096)
    add("--lr", type=float, default=1e-3)
    add("--dropout", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--collective-timeout", type=float, default=600.0, help="seconds until a collective fails because a peer is lost")
    return parser.parse_args()


def examples(count: int, seed: int) -> TensorDataset:
    """Points on two spirals, and on which of them each is."""
    generator = torch.Generator().manual_seed(seed)
    turn = 6 * torch.rand(count, generator=generator)
    spiral = torch.randint(2, (count,), generator=generator)
    angle = turn + torch.pi * spiral
    points = torch.stack((turn * angle.cos(), turn * angle.sin()), 1) / 6
    return TensorDataset(points + 0.02 * torch.randn(count, 2, generator=generator), spiral)


def saves(copies: str) -> bool:
    """Whether this rank writes the file: rank 0, or the first rank of each node."""
    return int(os.environ["LOCAL_RANK"]) == 0 if copies == "node" else dist.get_rank() == 0


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Replace the file in one step, so that it is whole whenever this process or the machine dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(path: Path) -> dict[str, Any] | None:
    """The newest checkpoint that any rank finds under `path`, on all ranks; None if there is none. Collective.

    On shared storage all ranks find the same one. On disks of their own, a rank that has the newest sends it to the others.
    """
    own = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
    epochs: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(epochs, own["epoch"] if own else -1)
    newest = max(epochs)
    if min(epochs) == newest:
        return own
    sent = [own]
    dist.broadcast_object_list(sent, src=epochs.index(newest))
    return sent[0]


def train_epoch(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader[tuple[Tensor, ...]],
    micro_steps: int,
    loss_factor: float,
) -> float:
    """The mean loss over all ranks. Micro-batches at the end that are too few for an optimizer step are left out."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    steps = len(batches) // micro_steps
    for number, (points, spiral) in enumerate(itertools.islice(batches, steps * micro_steps), 1):
        ends_step = number % micro_steps == 0
        with nullcontext() if ends_step else model.no_sync():  # the last backward averages the sum of all over the ranks
            loss = F.cross_entropy(model(points.to(device)), spiral.to(device)) * loss_factor
            loss.backward()
        total += loss.detach()
        if ends_step:
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total) / steps / dist.get_world_size()


def accumulated(args: argparse.Namespace) -> tuple[int, float]:
    """Micro-steps per optimizer step, and the factor of the loss of each."""
    if not args.global_batch:
        return 1, 1.0
    from elastic_ext import accumulation

    made = accumulation(args.global_batch, args.batch)
    if made.global_batch > args.examples:
        sys.exit(f"--global-batch is {made.global_batch}, expected at most --examples, {args.examples}")
    return made.micro_steps, made.loss_factor


def train(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(args.seed)
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = examples(args.examples, args.seed)
    micro_steps, loss_factor = accumulated(args)
    whole = args.global_batch > 0  # only whole batches, so that all of them are equally large at every number of ranks
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=args.seed, drop_last=whole)
    batches = DataLoader(data, args.batch, sampler=sampler, drop_last=whole)
    path, start_epoch = args.checkpoint_dir / NAME, 0

    checkpoint = load(path)
    if checkpoint is not None:
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_epoch = checkpoint["epoch"]
        say(f"Resuming from epoch {start_epoch}")

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(1_000_000 * args.seed + 1_000 * epoch + dist.get_rank())  # dropout
        loss = train_epoch(model, optimizer, batches, micro_steps, loss_factor)
        say(f"epoch {epoch} loss {loss:.6f} ({loss.hex()})")
        if saves(args.copies):
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1, "loss": loss}
            save(path, state)
    say(f"done after epoch {args.epochs - 1}")


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    args = parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=args.collective_timeout))
    train(args, device)
    dist.barrier()  # rank 0 has saved: no rank ends this node before that
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    if not torch.cuda.is_initialized():  # gloo's threads may abort an interpreter that ends beside them (pytorch issue 190489)
        sys.stdout.flush()
        os._exit(0)
