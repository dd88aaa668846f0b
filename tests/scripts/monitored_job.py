"""Steps until $FINISH is there, saved as long as $SAVING is. Each round prints `trains: NODE ATTEMPT RANK PID` after 3 steps.

With $IN_MEMORY also copied in memory.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from elastic_ext import Checkpointer

SAVE_EVERY, STEP_S = 10, 0.02

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = Checkpointer(model=model, optimizer=optimizer)
step = first = checkpointer.load().step
over = torch.zeros(2)
while not over[0]:
    over[0], over[1] = os.path.exists(os.environ["FINISH"]), os.path.exists(os.environ["SAVING"])
    dist.all_reduce(over, op=dist.ReduceOp.MIN)
    time.sleep(STEP_S)
    model(torch.ones(2)).backward()
    optimizer.step()
    step += 1
    if "IN_MEMORY" in os.environ:
        checkpointer.snapshot(step)
    if checkpointer.save_requested(step) or (over[1] and step % SAVE_EVERY == 0):
        checkpointer.save(step)
    if step == first + 3:
        me = (os.environ["NODE"], os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank(), os.getpid())
        sys.stdout.write(f"trains: {' '.join(map(str, me))}\n")
        sys.stdout.flush()
checkpointer.save(step, wait=True)
checkpointer.close()
dist.destroy_process_group()
