"""A job whose state is sharded over its ranks: it trains, saves in one way, and reports each step.

    memory_job.py SOCKET MODE MEGABYTES STEP_MS [STEPS]

SOCKET: a Unix datagram socket. A message is one JSON object: node, pid, rank, world, event, step, ns (CLOCK_MONOTONIC), stall_s
and every. The events: "resumed", before the first step; "step"; "done", after STEPS steps, with the median of the stalls and the
steps between two saves. Without STEPS it trains until it is killed.

MODE: none; memory: Checkpointer.snapshot after each step, as often as memory_every says; disk:N: Checkpointer.save every N steps;
torch:N, async:N: torch.save by each rank, and torch.distributed.checkpoint.async_save. A step takes STEP_MS of matrix products,
of a fixed number, so that what a save takes from them shows.
"""

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from device import DEVICE, finish, join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from elastic_ext import Checkpointer
from elastic_ext.training.progress import ProgressRow

TENSORS = 16
# (products, size of their matrices): about a millisecond on the machines of the published figures
A_MS = {"cpu": (26, 128), "cuda": (5, 4096)}


def model_of(megabytes: int) -> torch.nn.Module:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    each = max(dist.get_world_size(), megabytes * 1_000_000 // 4 // TENSORS)
    return torch.nn.ParameterList([distribute_tensor(torch.zeros(each, device=DEVICE), mesh, [Shard(0)]) for _ in range(TENSORS)])


def saver(mode: str, model: torch.nn.Module, checkpointer: Checkpointer) -> tuple[Callable[[int], object], int]:
    """Return what saves the state after a step, and every how many steps."""
    kind, _, every = mode.partition(":")
    directory = os.environ["ELASTIC_EXT_CHECKPOINT_DIR"]
    saving: list[Any] = []

    def plain(step: int) -> None:
        torch.save(model.state_dict(), f"{directory}/plain.{dist.get_rank()}.pt")

    def torch_async(step: int) -> None:
        if saving:
            found = saving.pop()
            getattr(found, "upload_completion", found).result()
        saving.append(dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{directory}/dcp"))

    saves = {
        "none": lambda step: None,
        "memory": checkpointer.snapshot,
        "disk": checkpointer.save,
        "torch": plain,
        "async": torch_async,
    }
    return saves[kind], int(every or 1)


def main(path: str, mode: str, megabytes: int, step_ms: int, steps: int) -> None:
    torch.set_num_threads(1)
    join(both=True)
    events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    events.connect(path)
    worker = {"node": os.environ.get("NODE", ""), "pid": os.getpid(), "rank": dist.get_rank(), "world": dist.get_world_size()}

    def report(event: str, step: int, stall_s: float = 0.0, every: int = 0) -> None:
        fields = {**worker, "event": event, "step": step, "ns": time.monotonic_ns(), "stall_s": stall_s, "every": every}
        events.send(json.dumps(fields).encode())

    model, (products, size) = model_of(megabytes), A_MS[DEVICE]
    one = torch.rand(size, size, device=DEVICE, dtype=torch.float32 if DEVICE == "cpu" else torch.bfloat16)
    optimizers = []
    if DEVICE == "cuda":  # copies from a GPU run beside training once they have seen the steps of an optimizer
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    stalls: list[float] = []
    copied: list[tuple[float, int]] = []
    with Checkpointer(model=model, optimizer=optimizers, keep_last=2) as checkpointer:
        save, every = saver(mode, model, checkpointer)
        if mode == "memory":  # most calls copy nothing
            ProgressRow.report_copied = lambda row, step, stall_s, every: copied.append((stall_s, every))
        first = checkpointer.load().step
        report("resumed", first)
        step = first
        while not steps or step < first + steps:
            for _ in range(step_ms * products):
                one @ one
            value = torch.ones(1, device=DEVICE)
            dist.all_reduce(value)
            for optimizer in optimizers:
                optimizer.step()
            finish()
            step += 1
            began = time.monotonic()
            if step % every == 0:
                save(step)
                stalls.append(time.monotonic() - began)
            report("step", step)
        counted = [stall_s for stall_s, _ in copied] if mode == "memory" else stalls
        report("done", step, statistics.median(counted[len(counted) // 3 :] or [0.0]), copied[-1][1] if copied else every)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]) if len(sys.argv) > 5 else 0)
