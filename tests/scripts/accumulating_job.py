"""Three optimizer steps with `elastic_ext.accumulation`: KIND (ddp or fsdp) GLOBAL_BATCH. Rank 0 prints `loss HEX` for each.

Every rank compares the gradient of each step with that of one process that takes all samples at once, and fails if they differ.
"""

import copy
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import elastic_ext

MICRO_BATCH, STEPS = 2, 3

kind, global_batch = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
steps = [elastic_ext.accumulation(global_batch, MICRO_BATCH) for _ in range(2)][-1]  # the second call does not warn again
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
samples = torch.randn(STEPS * steps.global_batch, 5)
alone = copy.deepcopy(network)
model = DistributedDataParallel(network) if kind == "ddp" else fully_shard(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(network: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (network(batch[:, :4]) - batch[:, 4:]).square().mean()


for step in range(STEPS):
    batch = samples[step * steps.global_batch : (step + 1) * steps.global_batch]
    total = torch.zeros(())
    for number, part in enumerate(batch[rank::world].split(MICRO_BATCH), 1):
        last = number == steps.micro_steps
        if kind == "fsdp":
            model.set_requires_gradient_sync(last)
        with model.no_sync() if kind == "ddp" and not last else nullcontext():
            loss = loss_of(model, part) * steps.loss_factor
            loss.backward()
        total += loss.detach()
    assert last
    dist.all_reduce(total)

    whole = loss_of(alone, batch)
    whole.backward()
    torch.testing.assert_close(total / world, whole.detach())
    for ours, right in zip(model.parameters(), alone.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if kind == "fsdp" else ours.grad
        torch.testing.assert_close(gradient, right.grad)
        with torch.no_grad():
            right -= 0.1 * right.grad
        right.grad = None
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"loss {float(whole).hex()}", flush=True)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
