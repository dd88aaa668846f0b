"""Steps whose collectives spin in C while they wait, as NCCL's do, for the tests of the hang detector. No GPU is needed.

spin_job.py FAULT[:RANK]...     after STEPS steps, in the first attempt only; it ends when the file $STOP is there

Some faults are none: they take $QUIET_S, and then the training goes on. $GROUP: "gloo" for waits that do not spin.
"""

import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from lines import say
from spinning_group import Delay, Spin

from elastic_ext.workers import progress_layout

STEPS = 80  # at least: until the agent has had a first answer from all ranks
LONG_S = 65.0
QUIET_S = float(os.environ.get("QUIET_S", "22"))  # how long what is no hang takes

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group(os.environ.get("GROUP", "spinning"))
rank, world = dist.get_rank(), dist.get_world_size()
others = dist.new_group()
faults = {name for name, _, who in (each.partition(":") for each in sys.argv[1:]) if attempt == 0 and who in ("", str(rank))}
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.01)


def has_answered() -> bool:
    """Whether this worker has answered the agent: else it is not asked where it stays."""
    told = json.loads(os.environ["ELASTIC_EXT_WORKER"])
    with open(told["progress"], "rb") as table:
        table.seek(told["slot"] * progress_layout.ROW_BYTES + 8 * progress_layout.ANSWERS)
        return int.from_bytes(table.read(8), sys.byteorder) > 1


def step() -> tuple[bool, bool]:
    """One step of all ranks: whether all have answered, and whether it was the last."""
    told = torch.tensor([float(has_answered()), float(os.path.exists(os.environ["STOP"]))])
    dist.all_reduce(told)
    weight.grad = torch.ones(4)
    optimizer.step()
    return told[0].item() == world, bool(told[1].item())


def mismatch() -> None:
    """This rank is in a collective of another group than the rest."""
    dist.all_reduce(torch.ones(1), group=others)


def elsewhere() -> None:
    """Each rank has begun another collective, and spins in C, in a frame of its own."""
    work = dist.all_reduce(torch.ones(1), group=others if rank else None, async_op=True)
    Spin().wait()
    work.wait()


def own_part() -> None:
    """One rank computes in one call into C, while the others spin: a tokenizer, say."""
    spin = Spin()
    threading.Timer(QUIET_S, spin.end).start()
    spin.wait()


def evaluate() -> None:
    """Nothing but collectives from the same line, which take nearly all of the time and move next to nothing."""
    Delay.seconds = 0.3
    end = time.monotonic() + QUIET_S
    more = torch.ones(1)
    while more.item():
        more.fill_(float(rank != 0 or time.monotonic() < end))
        dist.all_reduce(more, dist.ReduceOp.MIN)
    Delay.seconds = 0.0


def disordered() -> None:
    """Two collectives that end in another order than they began: gloo's counts then say for ever that one is outstanding."""
    both = [dist.all_reduce(torch.ones(size), async_op=True) for size in (10_000_000, 1)]
    for each in both:
        each.wait()


def long_part() -> None:
    """All ranks compute for longer than the limit of a collective that does not complete."""
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        torch.ones(100, 100) @ torch.ones(100, 100)


def helper() -> None:
    """All wait in a collective, but a thread of this rank computes, and then joins it: torch's own device threads can do so."""
    mine = threading.Thread(target=lambda: (own_part(), dist.all_reduce(torch.ones(1), group=others)))
    mine.start()
    dist.all_reduce(torch.ones(1), group=dist.group.WORLD)


def helped() -> None:
    """The others' part of `helper`."""
    dist.all_reduce(torch.ones(1), group=others)
    dist.all_reduce(torch.ones(1), group=dist.group.WORLD)


FAULTS = {each.__name__: each for each in (mismatch, elsewhere, own_part, evaluate, disordered, long_part, helper, helped)}

done, begun = 0, False
while True:
    answered, over = step()
    done += 1
    if done >= STEPS and answered and not begun:
        begun = True
        say(json.dumps({"rank": rank, "world": world, "attempt": attempt, "pid": os.getpid(), "at_s": time.monotonic()}))
        for fault in sorted(faults):
            FAULTS[fault]()
            say(f"{fault} is over at {rank}")
    if over:
        break
    time.sleep(0.1)
say(f"finished {rank}")
os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (PyTorch issue 190489)
