"""A gloo job that does what it is told, for the tests of the supervisor.

gloo_job.py [FAULT:RANK ...]      faults happen in the first attempt only, after some collectives
"""

import atexit
import json
import os
import signal
import sys
from contextlib import suppress

import torch
import torch.distributed as dist
from lines import say

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.ones(1)
for _ in range(3):
    dist.all_reduce(value)
report = {"rank": rank, "world": dist.get_world_size(), "attempt": attempt, "pid": os.getpid()}
say(json.dumps(report))
dist.barrier()  # all have said so before one does what it was told


def ignore_term() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("ignoring")
    with suppress(RuntimeError):  # the connection to one that has left the barrier may be lost before this one leaves it
        dist.barrier()
    while True:
        signal.pause()


def end_late() -> None:
    """Raise, part from the peers, and then take one's time to end, as some loggers do."""
    atexit.register(signal.pause)
    atexit.register(dist.destroy_process_group)
    raise KeyError("missing")


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
    "leave": lambda: os._exit(0),
    "key": lambda: {}["missing"],
    "runtime": lambda: (_ for _ in ()).throw(RuntimeError("flaky")),
    "ignore": ignore_term,
    "hang": signal.pause,
    "late": end_late,
    "receive": lambda: dist.recv(value, 0),
}

for argument in sys.argv[1:]:
    fault, _, who = argument.partition(":")
    if attempt == 0 and int(who) == rank:
        if fault != "ignore" and any(other.startswith("ignore") for other in sys.argv[1:]):
            dist.barrier()
        FAULTS[fault]()
dist.barrier()
sys.stdout.write(f"finished {rank}\n")
dist.destroy_process_group()
