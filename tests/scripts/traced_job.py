"""Train, fail, resume, and leave a trace of the time by this script's own clock.

    python -m elastic_ext.agent --nproc-per-node=2 traced_job.py TRACE_DIR [crash | wait]

Each rank appends `ROUND NAME STEP BEGAN ENDED` to TRACE_DIR/trace.RANK, in monotonic seconds: load, data, step, save, end. Each
begins where the last has ended. In the first round, rank 1 raises an error half way through the step after CRASH; with "wait",
all ranks stay in that step until they are killed, unless a file TRACE_DIR/go is there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elastic_ext
from elastic_ext import Checkpointer

STEPS, SAVE_AT, CRASH = 12, 4, 8
STEP_S, DATA_S = 0.15, 0.03

folder, ending = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, round_ = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
fails = not (folder / "go").exists() if ending == "wait" else round_ == "0"
out = (folder / f"trace.{rank}").open("a")
model = torch.nn.Linear(8, 8)
checkpointer = Checkpointer(model=model, optimizer=(optimizer := torch.optim.SGD(model.parameters(), 0.1)))
began = time.monotonic()


def note(name: str, step: int) -> None:
    global began
    ended = time.monotonic()
    print(round_, name, step, began, ended, file=out, flush=True)
    began = ended


note("load", (position := checkpointer.load()).step)
for step in range(position.step + 1, STEPS + 1):
    with elastic_ext.phase("data"):
        time.sleep(DATA_S)
    note("data", step)
    with elastic_ext.phase("step"):
        model(torch.ones(8)).sum().backward()
        time.sleep(STEP_S / 2)
        if fails and step == CRASH + 1 and ending == "wait":
            print("waits", flush=True)
            signal.pause()
        if fails and step == CRASH + 1 and rank == 1:
            note("crash", step)
            raise ConnectionResetError("the network, says this test")
        time.sleep(STEP_S / 2)
        optimizer.step()
    elastic_ext.report_tokens(10)
    elastic_ext.report_flops(2.5e6)
    note("step", step)
    if step == SAVE_AT:
        checkpointer.save(step, wait=True)
        note("save", step)
checkpointer.close()
dist.destroy_process_group()
note("end", STEPS)
