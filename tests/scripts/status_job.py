"""Trains and saves; what a TrainJob's status is made of.

status_job.py DIR TOTAL     $KILL=RANK:STEP: that rank is killed once, before its step STEP.
                            $AGAIN: wait there in the first step after a restart, when its loss is set; $GATE: after the last step
"""

import fcntl
import os
import signal
import sys

import torch
import torch.distributed as dist

import elastic_ext

folder, total = sys.argv[1], int(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], 0.1)
elastic_ext.report_total_steps(total)


def wait_at(name: str) -> None:
    if name in os.environ:
        with open(os.environ[name]) as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)  # the test holds it


first = (elastic_ext.resume_step() or 0) + 1
for step in range(first, total + 1):
    if attempt == 0 and os.environ.get("KILL") == f"{rank}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)
    weight.grad = torch.ones(1)
    dist.all_reduce(weight.grad)
    elastic_ext.report(loss=1 / step if rank == 0 else 7)
    if attempt and step == first:
        sys.stdout.write(f"again {rank}\n")
        sys.stdout.flush()
        wait_at("AGAIN")
    optimizer.step()
    if rank == 0 and step % 5 == 0:
        torch.save({"step": step}, f"{folder}/new")
        os.replace(f"{folder}/new", f"{folder}/model_{step}.pt")
    dist.barrier()
sys.stdout.write(f"trained {rank} {os.getpid()}\n")
sys.stdout.flush()
wait_at("GATE")
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (PyTorch issue 190489)
