"""Trains replicas by Adam up to $STEPS, with a checkpoint of rank 0 every 20; prints the last loss to the bit.

replicated_job.py FOLDER ddp|unequal|sparse|hsdp|fsdp|local

    unequal   as ddp, and each rank changes its parameters before it begins
    sparse    as ddp, and after the first step rank 1 has an optimizer state that cannot be hashed
    hsdp      two replicas of shards
    local     each rank by itself, no replicas

$FLIP is "ATTEMPT RANK STEP parameter|state", several of them separated by commas: after this step, one bit of this rank's
parameter, or of Adam's state, flips. Such a job trains on to the next step that is a multiple of 20, and waits there to be ended;
with $STEP_S, seconds to sleep in each step, it trains on to its end.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from lines import say
from torch.nn.parallel import DistributedDataParallel

import elastic_ext

EVERY = 20
folder, how = sys.argv[1:]
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
sleep_s = float(os.environ.get("STEP_S", "0"))
flips = [each.split() for each in os.environ.get("FLIP", "").split(",") if each.startswith(attempt)]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def in_order(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients so that no bit depends on the buckets, which DDP makes again after the first step."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(sum(parts[1:], parts[0]) / len(parts))
    return future


if how in ("ddp", "unequal", "sparse"):
    model = DistributedDataParallel(model)
    model.register_comm_hook(None, in_order)
elif how in ("hsdp", "fsdp"):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (2, dist.get_world_size() // 2) if how == "hsdp" else (dist.get_world_size(),)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step, loss = 0, torch.zeros(())
if (path := elastic_ext.resume_from()) is not None:
    found = torch.load(path)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    step = found["step"]
say(f"rank {rank} on {os.environ.get('NODE')} attempt {attempt} from step {step}")


def flip(what: str) -> None:
    say(f"rank {rank}: a bit flips at {time.monotonic()}")
    parameter = optimizer.param_groups[0]["params"][0]
    tensor = parameter if what == "parameter" else optimizer.state[parameter]["exp_avg"]
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensor.detach().view(torch.int32).view(-1)[7] ^= 1 << 20


if how == "unequal":
    with torch.no_grad():
        model.module[0].bias += rank
while (flips and not sleep_s) or step < int(os.environ["STEPS"]):
    time.sleep(sleep_s)
    data = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * rank + step))
    optimizer.zero_grad()
    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    step += 1
    if how == "sparse" and rank == 1:
        optimizer.state[optimizer.param_groups[0]["params"][0]]["extra"] = torch.eye(2).to_sparse()
    for _, of, at, what in flips:
        if (rank, step) == (int(of), int(at)):
            if gate := os.environ.get("GATE"):
                open(gate).close()  # a named pipe: until the test opens it
            flip(what)
    if rank == 0 and how == "ddp" and step % EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{folder}/new")
        os.replace(f"{folder}/new", f"{folder}/checkpoints/step_{step}.pt")
    if flips and not sleep_s and step > int(flips[0][2]) and step % EVERY == 0:
        say(f"rank {rank} waits after step {step}")
        signal.pause()
dist.all_reduce(total := loss.detach().clone())
say(f"rank {rank} attempt {attempt} loss {total.item().hex()}")
dist.destroy_process_group()
