"""Train on several nodes through a crash, a lost node, a hang and a preemption, and leave a trace by this script's own clock.

    AGENT=NAME python -m elastic_ext.agent ... traced_night.py TRACE_DIR

Each worker leaves its trace in TRACE_DIR/trace-AGENT.LOCAL_RANK (see `tracing.Traced`). Steps are collective. In the first
rounds, one after the other, one worker does what NIGHT says half way through a step; the others wait.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tracing import Traced

STEPS, SAVE_EVERY = 32, 6
# By round: the agent whose worker does it, what, in which step.
NIGHT = [("b", "crash", 10), ("b", "waits", 16), ("b2", "hangs", 22), ("a", "waits", 28)]

folder, agent = Path(sys.argv[1]), os.environ["AGENT"]
dist.init_process_group("gloo")
traced = Traced(folder / f"trace-{agent}.{os.environ['LOCAL_RANK']}")
culprit, what, at = NIGHT[traced.round] if traced.round < len(NIGHT) else ("", "", 0)


def halfway(step: int) -> None:
    if step == at:
        dist.barrier()  # so that no worker is stopped between a change of its state and its note
    if agent == culprit and step == at:
        print(f"{what} in round {traced.round}", flush=True)
        if what == "crash":
            raise ConnectionResetError("the network, says this test")
        signal.pause()
    dist.all_reduce(torch.zeros(1))


traced.run(STEPS, range(SAVE_EVERY, STEPS + 1, SAVE_EVERY), halfway)
