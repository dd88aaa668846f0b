"""Train a small model with `elastic_ext.Checkpointer`, and print what shows whether a resume is exact to the bit.

    torchrun --nproc-per-node=2 checkpointed_job.py DIRECTORY --wrap fsdp --steps 6 --save 4:0

Each rank appends lines to OUT.RANK: `loss STEP ACCUMULATION HEX`, `resumed STEP ACCUMULATION`, `state HASH` at the end. Dropout
and a random draw for each batch show whether the generators are right; each rank shuffles a share of the data of its own.

With --save-every N each rank prints `pid PID is at step STEP` when it has made 3 * N steps. If $HOLD is set, a rank that began at
step 0 makes no more: it waits there until it is killed.
"""

import argparse
import gc
import hashlib
import logging
import os
import random
import signal
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from elastic_ext import Checkpointer

WIDTH, EXAMPLES, BATCH = 12, 40, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 17), nn.BatchNorm1d(17), nn.Linear(17, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(F.gelu(self.norm(self.first(x))), 0.3, self.training))


class Average:
    """Of the weights, as an `extra`."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict:
        return self.values

    def load_state_dict(self, values: dict) -> None:
        self.values = values


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.first, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model) if kind == "ddp" else model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all parameters and moments, whole: the same at every world size and under every wrapper."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        moments = optimizer.state.get(parameter, {})
        for tensor in (parameter.detach(), *(moments[key] for key in sorted(moments))):
            digest.update(bytes(whole(tensor).contiguous().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--out", required=True)
    parser.add_argument("--wrap", choices=("fsdp", "ddp", "plain"), default="fsdp")
    parser.add_argument("--no-sync", action="store_true", help="DDP: gradients differ between ranks in mid-accumulation")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=3)
    parser.add_argument("--save", action="append", default=[], metavar="STEP:ACCUMULATION")
    parser.add_argument("--save-every", type=int, default=0, help="steps; and whenever the agent asks")
    parser.add_argument("--workers", type=int, default=0, help="processes of the data loader")
    return parser.parse_args(words)


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.INFO)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(args)
    if dist.is_initialized():
        # Before the group: the destructor of DDP's reducer holds the GIL, and waits for gloo's thread if it has the last
        # reference to the group. That thread may wait for the GIL.
        gc.collect()
        dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = wrapped(args.wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.randn(EXAMPLES, WIDTH + 1, generator=torch.Generator().manual_seed(1))
    loader = StatefulDataLoader(data[rank::world], batch_size=BATCH, shuffle=True, drop_last=True, num_workers=args.workers)
    average = Average(model.module if args.wrap == "ddp" else model)
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    checkpointer = Checkpointer(
        args.directory, model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader, extra={"average": average}
    )
    with open(f"{args.out}.{rank}", "a") as out:
        position = checkpointer.load()
        print("resumed", position.step, position.accumulation, file=out, flush=True)
        print("loaded", state_hash(model, optimizer), file=out, flush=True)
        step, epoch, accumulation = position.step, position.epoch, position.accumulation
        while step < args.steps:
            for batch in loader:
                noise = random.random() * torch.rand(())
                if args.wrap == "ddp":
                    model.require_backward_grad_sync = not args.no_sync or accumulation + 1 == args.accumulate
                loss = (model(batch[:, :-1] + noise) - batch[:, -1:]).square().mean() / args.accumulate
                loss.backward()
                print("loss", step, accumulation, loss.item().hex(), file=out, flush=True)
                accumulation += 1
                if accumulation == args.accumulate:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    average.update(model.module if args.wrap == "ddp" else model)
                    step, accumulation = step + 1, 0
                    if args.save_every:
                        asked = checkpointer.save_requested(step)
                        if asked or step % args.save_every == 0:
                            checkpointer.save(step, epoch=epoch)
                        if step - position.step == 3 * args.save_every:
                            print(f"pid {os.getpid()} is at step {step}", flush=True)
                            while position.step == 0 and "HOLD" in os.environ:
                                signal.pause()  # until it is killed, or ended with the one that was
                if f"{step}:{accumulation}" in args.save:
                    checkpointer.save(step, epoch=epoch, accumulation=accumulation)
                if step == args.steps:
                    break
            else:
                epoch += 1
        checkpointer.close()
        print("lr", optimizer.param_groups[0]["lr"], "error", checkpointer.last_error, file=out)
        print("average", state_hash_of(average.values), file=out)
        print("state", state_hash(model, optimizer), file=out, flush=True)


def state_hash_of(values: dict) -> str:
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(bytes(whole(values[name]).contiguous().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
