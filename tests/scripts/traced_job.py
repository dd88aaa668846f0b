"""Train, fail, resume, and leave a trace of the time by this script's own clock.

    python -m elastic_ext.agent --nproc-per-node=2 traced_job.py TRACE_DIR [crash | wait]

Each rank leaves its trace in TRACE_DIR/trace.RANK (see `tracing.Traced`). In the first round, rank 1 raises an error half way
through the step after CRASH, and the others wait there; with "wait", all ranks stay in that step until they are killed, unless a
file TRACE_DIR/go is there.
"""

import signal
import sys
from pathlib import Path

import torch.distributed as dist
from tracing import Traced

STEPS, SAVE_AT, CRASH = 12, 4, 8

folder, ending = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
traced = Traced(folder / f"trace.{dist.get_rank()}")
fails = not (folder / "go").exists() if ending == "wait" else traced.round == 0


def halfway(step: int) -> None:
    if fails and step == CRASH + 1 and ending == "wait":
        print("waits", flush=True)
        signal.pause()
    if fails and step == CRASH + 1 and ending == "crash":
        dist.barrier()  # so that no rank is stopped between the report of a step and its note
        while dist.get_rank() != 1:
            signal.pause()
        raise ConnectionResetError("the network, says this test")


traced.run(STEPS, [SAVE_AT], halfway)
