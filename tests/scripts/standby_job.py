"""For the tests of warm standbys: each worker says whether torch was there before it, does what a kind of job does, and waits.

standby_job.py KINDS LAST     KINDS: some of plain-ddp-fsdp; LAST: the attempt that ends well by itself, -1 for none
"""

import gc
import os
import sys

warm = "torch" in sys.modules

import json  # noqa: E402
import signal  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

kinds, last = sys.argv[1].split("-"), int(sys.argv[2])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.full((1,), float(rank))
dist.all_reduce(total)
assert total.item() == world * (world - 1) / 2


def train(kind: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 8) * (rank + 1)).square().mean().backward()
        optimizer.step()


for each in kinds:
    train(each)
report = {"attempt": attempt, "rank": rank, "warm": warm, "pid": os.getpid()}
sys.stdout.write("up " + json.dumps(report) + "\n")
sys.stdout.flush()
dist.barrier()
if attempt != last:
    signal.pause()
gc.collect()  # the models, before the group: see checkpointed_job.py
dist.destroy_process_group()
