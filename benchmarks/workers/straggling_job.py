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
    times      file to which rank 0 writes at the end what its steps after the first ones took: {"steps": [SECONDS, ...],
               "sampled": [INDEX, ...]}; a sample of the flight recorder was taken after the steps of these indices
    samples    the job ends sooner, once it was sampled so often; 0: it does not
    first      steps before that, whose samples do not count
"""

import json
import os
import sys
import threading
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
state, steps, began, ended = torch.zeros(1), 0, 0.0, 0.0
took: list[float] = []
sampled = set[int]()


def stamp(event: str) -> None:
    if rank == 0:
        with open(plan["stamps"], "a") as file:
            host = os.environ.get("ELASTIC_EXT_NODE_NAME", "")
            file.write(json.dumps({"event": event, "time": time.time(), "steps": steps, "host": host}) + "\n")


def note() -> None:
    """Keep what this step took, and which of the next ones is to be sampled."""
    global ended
    last, ended = ended, time.monotonic()
    took.append(ended - last)
    for thread in threading.enumerate():
        if thread.name == "elastic_ext flight recorder" and thread.sampler.at_step:
            sampled.add(thread.sampler.at_step)


def named() -> bool:
    return until.exists() and '"event":"straggler"' in until.read_text()


def sampled_often() -> bool:
    return 0 < plan["samples"] <= sum(plan["first"] <= each < steps - 4 for each in sampled)


while True:
    time.sleep(plan["step_s"] + (plan["late_s"] if state.item() == LATE and rank in plan["late"] else 0.0))
    for _ in range(plan["matmul"]):
        matrix = torch.nn.functional.normalize(matrix @ matrix)
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    steps += 1
    note()
    if steps == WARM_UP:
        began = time.monotonic()
        stamp("begin")
    before = state.item()
    if rank == 0 and steps > WARM_UP:
        lasted_s = time.monotonic() - began
        over = lasted_s >= plan["seconds"] or (steps % 16 == 0 and (named() or sampled_often()))
        state.fill_(OVER if over else LATE if plan["late"] and lasted_s >= plan["begin_s"] else TRAINS)
    dist.broadcast(state, 0)
    if state.item() == OVER:
        stamp("end")
        break
    if state.item() == LATE and before == TRAINS:
        stamp("late")
if rank == 0 and plan["times"]:
    after = [each - WARM_UP - 1 for each in sorted(sampled) if WARM_UP < each <= steps]  # step 1 has index 0
    Path(plan["times"]).write_text(json.dumps({"steps": took[WARM_UP:], "sampled": after}))
dist.destroy_process_group()
