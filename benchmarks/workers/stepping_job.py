"""A gloo job that trains until it is killed, and tells each step.

    stepping_job.py SOCKET

SOCKET: a Unix datagram socket. Each message is one JSON object: node ($NODE), pid, rank, world, event, ns. ns is CLOCK_MONOTONIC,
which is one for all processes of a Linux machine, in network namespaces too. The only event is "step": an all_reduce is done.
"""

import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist

STEP_S = 0.02  # what the model takes in a step; three workers that never rest would leave nothing of two cores for the agents

told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
told.connect(sys.argv[1])
dist.init_process_group("gloo")
who = {"node": os.environ["NODE"], "pid": os.getpid(), "rank": dist.get_rank(), "world": dist.get_world_size()}
while True:
    value = torch.ones(1)
    dist.all_reduce(value)
    if value.item() != who["world"]:
        raise SystemExit(f"all_reduce gave {value.item()}, expected {who['world']}")
    told.send(json.dumps({**who, "event": "step", "ns": time.monotonic_ns()}).encode())
    time.sleep(STEP_S)
