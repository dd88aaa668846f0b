"""A gloo job that trains until it is killed, and reports each step.

    stepping_job.py SOCKET

SOCKET: a Unix datagram socket. Each message is one JSON object with the fields of job_events.WorkerEvent. The only event here is
"step": an all_reduce is done.
"""

import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist

STEP_S = 0.02  # the time of a model; three workers without a pause would leave the agents nothing of two cores

events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
events.connect(sys.argv[1])
dist.init_process_group("gloo")
worker = {"node": os.environ["NODE"], "pid": os.getpid(), "rank": dist.get_rank(), "world": dist.get_world_size()}
while True:
    value = torch.ones(1)
    dist.all_reduce(value)
    if value.item() != worker["world"]:
        raise SystemExit(f"all_reduce gave {value.item()}, expected {worker['world']}")
    events.send(json.dumps({**worker, "event": "step", "ns": time.monotonic_ns()}).encode())
    time.sleep(STEP_S)
