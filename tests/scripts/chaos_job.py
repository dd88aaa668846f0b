"""A job for the kill loop: small steps, a save every few of them, until the file FINISH is there; it tells what it does.

    chaos_job.py EVENTS FINISH

EVENTS is a named pipe, which gets one JSON object a line: what ("loaded", "step", "saving" or "done"), the node, the rank, the
group (the store's port and the restart count: another one in each round), pid and step. The one parameter counts the steps, so
a state that is not that of its step is seen at the load.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from elastic_ext import Checkpointer

SAVE_EVERY = 10
STEP_S = 0.02  # of work: the agents need the processors too


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(1))

    def forward(self) -> torch.Tensor:
        return -self.steps.sum()


def main(events: str, finish: str) -> None:
    with open(events, "wb", buffering=0) as pipe:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        group = f"{os.environ['MASTER_PORT']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        me = {"node": os.environ["CHAOS_NODE"], "rank": rank, "world": dist.get_world_size(), "group": group, "pid": os.getpid()}

        def tell(what: str, step: int, **more: object) -> None:
            pipe.write(json.dumps({"what": what, **me, "step": step, **more}).encode() + b"\n")  # atomic: less than PIPE_BUF

        model = Count()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        checkpointer = Checkpointer(model=model, optimizer=optimizer)
        position = checkpointer.load()
        tell("loaded", position.step, path=position.path or "", holds=model.steps.item())
        step = position.step
        over = torch.zeros(1)
        while not over.item():
            over.fill_(rank == 0 and os.path.exists(finish))
            dist.all_reduce(over)
            time.sleep(STEP_S)
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            tell("step", step)
            if checkpointer.save_requested(step) or step % SAVE_EVERY == 0:
                tell("saving", step)
                checkpointer.save(step)
        checkpointer.save(step, wait=True)
        checkpointer.close()
        tell("done", step, error=checkpointer.last_error)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
