"""Ranks that train and then hang once: as long as no fault is stamped. They stamp the progress of each attempt.

    hanging_job.py HANG STAMPS TIMEOUT [SECONDS]

    HANG       sleep: each rank waits in another all_reduce, asleep, as gloo waits
               spin: the same, but each waits with a whole core, as NCCL waits (tests/scripts/spinning_group.py)
               device: they wait for their GPU, which waits in different collectives (needs JOB_DEVICE=cuda)
               item: the same, in `loss.item()`
               elsewhere: each has begun another collective, as NCCL's are begun, and its main thread computes
               stopped: rank 1 gets SIGSTOP
               evaluates: no hang: rank 0 works alone for SECONDS, and rank 1 waits for it in a barrier, with a whole core
               compiles: no hang: rank 1 compiles for SECONDS before its first step, and rank 0 waits in the step's collective
    STAMPS     a file; see faulty_job.py
    TIMEOUT    of torch's collectives, in seconds. Rank 0's own is what ends the job where nothing else does

The events: fault (right before it; where there is no hang, when the wait begins), begin (the first line of
this file), all_reduce (the first is done).
"""

import time

begin_ns = time.monotonic_ns()

import functools  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from datetime import timedelta  # noqa: E402
from itertools import count  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from device import DEVICE, finish, join  # noqa: E402

HANG, STAMPS, TIMEOUT_S, *SECONDS = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:])
STEPS = 100
ROOT = Path(__file__).parents[2]
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
RANK = int(os.environ["RANK"])

if HANG in ("spin", "evaluates"):
    sys.path.insert(0, str(ROOT / "tests" / "scripts"))
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
    if HANG == "elsewhere":
        value = torch.ones(4)
        begin = dist.all_reduce if RANK == 0 else functools.partial(dist.all_gather, [torch.ones(4), torch.ones(4)], group=other)
        _pending = begin(value, async_op=True)
        while True:
            math.factorial(2000)
    value = torch.ones(1, device=DEVICE)
    dist.all_reduce(value, group=other if RANK == 1 else None)
    finish() if HANG != "item" else value.item()


def train(goes_on: Callable[[int], bool]) -> None:
    """goes_on: whether to take one more step after this many."""
    weight = torch.nn.Parameter(torch.ones(4, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for done in count():
        if not goes_on(done):
            return
        gradient = torch.ones(4, device=DEVICE)
        dist.all_reduce(gradient)
        weight.grad = gradient
        optimizer.step()
        time.sleep(0.05)


def works_alone() -> None:
    """What takes long and is no hang."""
    stamp(fault=time.monotonic_ns())
    end = time.monotonic() + SECONDS[0]
    if HANG == "evaluates" and RANK == 0:
        while time.monotonic() < end:
            math.factorial(2000)
    if HANG == "compiles" and RANK == 1:
        while time.monotonic() < end:
            torch._dynamo.reset()
            torch.compile(torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(20)]), backend="aot_eager")(torch.ones(4))
    dist.all_reduce(torch.ones(1))


def trains_first() -> bool:
    """Whether nothing has happened yet. The restart count does not show it: stock's agents count apart, and not every restart."""
    return not os.path.exists(STAMPS) or '"fault"' not in Path(STAMPS).read_text()


stamp(begin=begin_ns)
join("spinning" if "spinning_group" in sys.modules else "gloo", timedelta(seconds=TIMEOUT_S))
dist.all_reduce(torch.ones(1, device=DEVICE))
finish()
stamp(all_reduce=time.monotonic_ns())
if SECONDS:
    if HANG == "compiles":
        works_alone()
    train(lambda done: done < STEPS)
    if HANG == "evaluates":
        works_alone()
    train(lambda done: done < STEPS)
elif trains_first():
    other_group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    train(lambda done: done < STEPS)
    fault(other_group)
dist.barrier() if "spinning_group" not in sys.modules else dist.all_reduce(torch.ones(1))
finish()
os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (PyTorch issue 190489)
