"""Train on several nodes through a crash, a lost node, a hang and a preemption, and leave a trace by this script's own clock.

    AGENT=NAME python -m elastic_ext.agent ... traced_night.py TRACE_DIR

Each worker appends `ROUND NAME STEP BEGAN ENDED` to TRACE_DIR/trace-AGENT.LOCAL_RANK, as `traced_job.py` does. Steps are
collective. In the first rounds, one after the other, one worker does what NIGHT says half way through a step; the others wait.
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

STEPS, SAVE_EVERY = 32, 6
STEP_S, DATA_S = 0.15, 0.03
# By round: the agent whose worker does it, what, in which step.
NIGHT = [("b", "crash", 10), ("b", "waits", 16), ("b2", "hangs", 22), ("a", "waits", 28)]

folder, agent = Path(sys.argv[1]), os.environ["AGENT"]
dist.init_process_group("gloo")
round_ = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
culprit, what, at = NIGHT[round_] if round_ < len(NIGHT) else ("", "", 0)
out = (folder / f"trace-{agent}.{os.environ['LOCAL_RANK']}").open("a")
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
        if agent == culprit and step == at:
            note("crash", step)
            print(f"{what} in round {round_}", flush=True)
            if what == "crash":
                raise ConnectionResetError("the network, says this test")
            signal.pause()
        dist.all_reduce(torch.zeros(1))
        time.sleep(STEP_S / 2)
        optimizer.step()
    note("step", step)
    if step % SAVE_EVERY == 0:
        checkpointer.save(step, wait=True)
        note("save", step)
checkpointer.close()
dist.destroy_process_group()
note("end", STEPS)
