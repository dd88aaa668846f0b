"""A job whose ranks end as a collective backend of NCCL ends them: they print its words, $WORDS, and call abort().

aborting_job.py SCENARIO     what happens in the first tries; then the job ends well
    hang    another rank stands still in each of two tries, and the timeout of the other one ends it
    lost    rank 2 is gone with its node, once the test has ended that
    xid     rank 2 has lost its GPU: the driver says so in the kernel log
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from lines import say

(scenario,) = sys.argv[1:]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], 0.1)
for _ in range(20):
    parameter.grad = torch.ones(1)
    dist.all_reduce(parameter.grad)
    optimizer.step()
say(json.dumps({"rank": rank, "world": world, "attempt": attempt, "node": os.environ["NODE"]}))
dist.barrier()


def end() -> NoReturn:
    """As the watchdog of the backend does."""
    sys.stderr.write(os.environ["WORDS"].format(rank))
    sys.stderr.flush()
    os.abort()


if scenario == "hang" and attempt < 2:
    if rank == attempt:
        signal.pause()
    end()
if scenario in ("lost", "xid") and attempt == 0:
    if scenario == "xid" and rank == 2:
        Path("/dev/kmsg").write_text("3,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.\n")
        end()
    with suppress(RuntimeError):  # of gloo, when the peer has gone
        dist.barrier()
    end()
say(f"finished {rank}")
