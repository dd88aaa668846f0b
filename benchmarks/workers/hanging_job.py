"""Two ranks that train and then hang once, in the first attempt. They stamp the progress of each attempt.

    hanging_job.py HANG STAMPS TIMEOUT

    HANG       sleep: each rank waits in another all_reduce, asleep, as gloo waits
               spin: the same, but each waits with a whole core, as NCCL waits (tests/scripts/spinning_group.py)
               stopped: rank 1 gets SIGSTOP
    STAMPS     a file; see faulty_job.py
    TIMEOUT    of torch's collectives, in seconds. Rank 0's own is what ends the job where nothing else does

The events: fault (attempt 0, each rank right before it), begin (the first line of this file), all_reduce (the first is done).
"""

import time

begin_ns = time.monotonic_ns()

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

HANG, STAMPS, TIMEOUT_S = sys.argv[1], sys.argv[2], float(sys.argv[3])
STEPS = 100
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
RANK = int(os.environ["RANK"])

if HANG == "spin":
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "scripts"))
    import spinning_group  # noqa: F401 - registers the backend


def stamp(**events: int) -> None:
    """Append all events in one write, so that the lines of several workers do not mix."""
    lines = [json.dumps({"attempt": ATTEMPT, "rank": RANK, "event": event, "ns": ns}) + "\n" for event, ns in events.items()]
    with open(STAMPS, "ab", buffering=0) as file:
        file.write("".join(lines).encode())


def fault(other: dist.ProcessGroup) -> None:
    stamp(fault=time.monotonic_ns())
    if HANG == "stopped" and RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1), group=other if RANK == 1 else None)


dist.init_process_group("spinning" if HANG == "spin" else "gloo", timeout=timedelta(seconds=TIMEOUT_S))
dist.all_reduce(torch.ones(1))
stamp(begin=begin_ns, all_reduce=time.monotonic_ns())
if ATTEMPT == 0:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    other_group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    for _ in range(STEPS):
        gradient = torch.ones(4)
        dist.all_reduce(gradient)
        weight.grad = gradient
        optimizer.step()
        time.sleep(0.05)
    fault(other_group)
dist.barrier() if HANG != "spin" else dist.all_reduce(torch.ones(1))
os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (PyTorch issue 190489)
