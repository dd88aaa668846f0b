"""Steps with one all_reduce each, and what can go wrong with them, for the tests of the hang detector.

hang_job.py [FAULT:RANK ...]      faults happen in the first attempt only, after STEPS steps; a job without one ends when the file
                                  $STOP is there
"""

import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from lines import say

import elastic_ext

STEPS = 5
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
faults = {fault for fault, _, who in (argument.partition(":") for argument in sys.argv[1:]) if attempt == 0 and int(who) == rank}
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.01)


def step() -> bool:
    """One step of all ranks; True when it was the last."""
    over = torch.tensor([float(os.path.exists(os.environ["STOP"]))])
    dist.all_reduce(over)
    weight.grad = torch.ones(4)
    optimizer.step()
    return bool(over.item())


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def evaluate() -> None:
    """Longer than any limit of the tests; then on with the training."""
    with elastic_ext.phase("eval"):
        time.sleep(float(os.environ["EVAL_S"]))
    say(f"evaluated {rank}")


def starve() -> None:
    """Into a group that gets hardly any processor time; then there is a lot to do."""
    with open(os.environ["GROUP"] + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    while True:
        pass


def leave() -> None:
    """End with 0; a child keeps the connections open, so that the others wait."""
    if os.fork() == 0:
        signal.pause()
    os._exit(0)


FAULTS = {
    "leave": leave,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "deadlock": deadlock,
    "eval": evaluate,
    "starve": starve,
}

done = 0
while True:
    over = step()
    done += 1
    if done == STEPS:
        report = {"rank": rank, "world": world, "attempt": attempt, "pid": os.getpid()}
        say(json.dumps(report))
        for fault in faults:
            FAULTS[fault]()
    if over:
        break
    time.sleep(0.01)
say(f"finished {rank}")
dist.destroy_process_group()
os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (PyTorch issue 190489)
