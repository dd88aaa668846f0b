"""Train in small steps and save every tenth, until all nodes of a test have seen what it wants to see.

long_job.py FOLDER      checkpoints go to FOLDER/checkpoints; the job ends at the first step boundary after FOLDER/end exists
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_ext import Checkpointer

EVERY = 10

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
checkpointer = Checkpointer(
    folder / "checkpoints", model=model, optimizer=(optimizer := torch.optim.SGD(model.parameters(), 0.1))
)
step = began = checkpointer.load().step
over = torch.zeros(1)
while not over:
    model(torch.ones(8)).sum().backward()
    over[0] = (folder / "end").exists()
    dist.all_reduce(over)  # also keeps the ranks in step
    optimizer.step()
    step += 1
    if step % EVERY == 0:
        checkpointer.save(step)
    if step == began + 300:
        print(f"{step - began} steps of this round", flush=True)
checkpointer.close()
dist.barrier()
