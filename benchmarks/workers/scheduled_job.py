"""A job with steps of a fixed time that saves every SAVE_EVERY steps, and fails on a signal.

    scheduled_job.py SOCKET STEP_MS SAVE_EVERY

SOCKET: a Unix datagram socket. Each message is one JSON object: event, node, pid, rank, step, saved (the newest step that is
committed) and ns (CLOCK_MONOTONIC). The events: "resumed", of each rank before its first step; of rank 0, "step", and "saved"
once a save is committed.
SIGUSR1: it raises an exception. SIGUSR2: it leaves with the code by which scripts report that their node is bad.
"""

import json
import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist

from elastic_ext import Checkpointer

BAD_NODE = 201
LOOK_S = 0.01


def raises(*_: object) -> None:
    raise RuntimeError("flaky")


def leaves(*_: object) -> None:
    sys.exit(BAD_NODE)


def main(path: str, step_s: float, save_every: int) -> None:
    signal.signal(signal.SIGUSR1, raises)
    signal.signal(signal.SIGUSR2, leaves)
    dist.init_process_group("gloo")
    events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    events.connect(path)
    worker = {"node": os.environ["NODE"], "pid": os.getpid(), "rank": dist.get_rank()}
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Checkpointer(model=model, optimizer=optimizer, keep_last=2) as checkpointer:

        def report(event: str, step: int) -> None:
            fields = {**worker, "event": event, "step": step, "saved": checkpointer.last_saved, "ns": time.monotonic_ns()}
            events.send(json.dumps(fields).encode())

        step = checkpointer.load().step

        def compute() -> None:
            """Take as long as a step, and see when a save is committed meanwhile."""
            seen, until_s = checkpointer.last_saved, time.monotonic() + step_s
            while (left_s := until_s - time.monotonic()) > 0:
                time.sleep(min(left_s, LOOK_S))
                if worker["rank"] == 0 and checkpointer.last_saved != seen:
                    seen = checkpointer.last_saved
                    report("saved", seen)

        report("resumed", step)
        while True:
            compute()
            dist.all_reduce(torch.ones(1))
            optimizer.step()
            step += 1
            if step % save_every == 0:
                checkpointer.save(step)
            if worker["rank"] == 0:
                report("step", step)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) / 1000, int(sys.argv[3]))
