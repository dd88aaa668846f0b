"""Train, crash once, resume, and leave a trace of the time by this script's own clock.

    python -m elastic_ext.agent --nproc-per-node=2 traced_job.py TRACE_DIR

Each rank appends `NAME STEP BEGAN ENDED` to TRACE_DIR/RANK, in monotonic seconds: load, data, step, save. Rank 1 ends with an
error in the first round, half way through step CRASH + 1.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elastic_ext
from elastic_ext import Checkpointer

STEPS, SAVE_AT, CRASH = 14, 4, 9
STEP_S, DATA_S = 0.08, 0.04

dist.init_process_group("gloo")
rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
out = (Path(sys.argv[1]) / str(rank)).open("a")


def note(name: str, step: int, began: float) -> None:
    print(name, step, began, time.monotonic(), file=out, flush=True)


model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpointer = Checkpointer(model=model, optimizer=optimizer)
began = time.monotonic()
position = checkpointer.load()
note("load", position.step, began)
for step in range(position.step + 1, STEPS + 1):
    began = time.monotonic()
    with elastic_ext.phase("data"):
        time.sleep(DATA_S)
    note("data", step, began)
    began = time.monotonic()
    with elastic_ext.phase("step"):
        model(torch.ones(64)).sum().backward()
        time.sleep(STEP_S / 2)
        if first and step == CRASH + 1 and rank == 1:
            note("crash", step, began)
            raise ConnectionResetError("the network, says this test")
        time.sleep(STEP_S / 2)
        optimizer.step()
        note("step", step, began)
    elastic_ext.report_tokens(10)
    elastic_ext.report_flops(2.5e6)
    if step == SAVE_AT:
        began = time.monotonic()
        checkpointer.save(step, wait=True)
        note("save", step, began)
checkpointer.close()
dist.destroy_process_group()
