"""Data-parallel training over gloo, of which some ranks are late from some moment on.

    straggling_job.py PLAN

PLAN: a JSON object.

    step_s     each rank sleeps so long in a step
    matmul     and multiplies a number of matrices of 256 x 256
    late       ranks that sleep longer, by late_s
    late_s
    begin_s    after the first step; from then on they do
    seconds    after the first step; then the job ends
    stamps     file to which rank 0 writes a line of JSON for each event: {"event": NAME, "time": UNIX SECONDS, "steps": COUNT,
               "host": THAT OF RANK 0}.
               begin: after the first step. late: they are late from now on. end: the job ends
    until      file: where it holds '"event":"straggler"', the job ends sooner
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 10  # steps before `begin`
TRAINS, LATE, OVER = 0.0, 1.0, 2.0

plan = json.loads(sys.argv[1])
until = Path(plan["until"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch, matrix = torch.randn(16, 64), torch.randn(256, 256)
state, steps, began = torch.zeros(1), 0, 0.0


def stamp(event: str) -> None:
    if rank == 0:
        with open(plan["stamps"], "a") as file:
            host = os.environ.get("ELASTIC_EXT_NODE_NAME", "")
            file.write(json.dumps({"event": event, "time": time.time(), "steps": steps, "host": host}) + "\n")


def named() -> bool:
    return until.exists() and '"event":"straggler"' in until.read_text()


while True:
    time.sleep(plan["step_s"] + (plan["late_s"] if state.item() == LATE and rank in plan["late"] else 0.0))
    for _ in range(plan["matmul"]):
        matrix = torch.nn.functional.normalize(matrix @ matrix)
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    steps += 1
    if steps == WARM_UP:
        began = time.monotonic()
        stamp("begin")
    before = state.item()
    if rank == 0 and steps > WARM_UP:
        lasted_s = time.monotonic() - began
        over = lasted_s >= plan["seconds"] or (steps % 16 == 0 and named())
        state.fill_(OVER if over else LATE if plan["late"] and lasted_s >= plan["begin_s"] else TRAINS)
    dist.broadcast(state, 0)
    if state.item() == OVER:
        stamp("end")
        break
    if state.item() == LATE and before == TRAINS:
        stamp("late")
dist.destroy_process_group()
