"""A job whose rank 1 fails once, in the first attempt after some collectives and a step. It stamps the progress of each attempt.

    faulty_job.py FAULT STAMPS WORK STANDBYS

    FAULT      kill, exit, raise, segv, or ignore (rank 1 is killed while rank 0 ignores SIGTERM)
    WORK       none, ddp or fsdp: the two optimizer steps of each attempt
    STANDBYS   1: the fault waits until the agent has as many warm standbys as workers; 0: it does not
    STAMPS     a file. Each event is appended to it as one JSON line: attempt, rank, event, ns. ns is CLOCK_MONOTONIC, which all
               processes of a Linux machine share

The events, in order:

    process      the kernel made this process: starttime of /proc/self/stat, which counts in ticks of 10 ms, rounded down
    user_code    the first line of this file
    torch        torch and torch.distributed are imported
    all_reduce   the process group is up and the first all_reduce is done
    steps        two optimizer steps are done, unless WORK is none
    fault        (attempt 0, rank 1) right before the fault
"""

import time

user_code_ns = time.monotonic_ns()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch_ns = time.monotonic_ns()

import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

from device import DEVICE, finish, join  # noqa: E402

COLLECTIVES = 5
START_TIME_FIELD = 22  # of /proc/PID/stat, counted from 1; see proc_pid_stat(5)

ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
RANK = int(os.environ["RANK"])


def process_ns() -> int:
    """When this process was made, on CLOCK_MONOTONIC. The kernel reports CLOCK_BOOTTIME, which also counts time asleep."""
    with open("/proc/self/stat") as stat:
        after_name = stat.read().rpartition(")")[2].split()  # field 2 is the name, which may contain anything
    ticks = int(after_name[START_TIME_FIELD - 3])
    asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return ticks * 10**9 // os.sysconf("SC_CLK_TCK") - asleep_ns


def stamp(file: int, **events: int) -> None:
    """Append all events in one write, so that the lines of several workers do not mix."""
    lines = [json.dumps({"attempt": ATTEMPT, "rank": RANK, "event": event, "ns": ns}) + "\n" for event, ns in events.items()]
    os.write(file, "".join(lines).encode())


def all_reduce() -> None:
    value = torch.ones(1, device=DEVICE)
    dist.all_reduce(value)
    if value.item() != dist.get_world_size():
        raise SystemExit(f"all_reduce gave {value.item()}, expected {dist.get_world_size()}")


def one_step() -> None:
    """The fault comes in mid-training: before the first step an unknown failure is tried again only after a wait."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight]).step()


def two_steps(work: str) -> None:
    if work == "none":
        return
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(DEVICE)
    if work == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(8, 64, device=DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    finish()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segv() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # writing a core file would be measured, too
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    sys.exit(3)


def throw() -> None:
    raise RuntimeError("flaky")


FAULTS = {"kill": kill, "exit": leave, "raise": throw, "segv": segv, "ignore": kill}


def main(fault: str, stamps: str, work: str, wait: str) -> None:
    file = os.open(stamps, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    stamp(file, process=process_ns(), user_code=user_code_ns, torch=torch_ns)
    ignores = ATTEMPT == 0 and RANK == 0 and fault == "ignore"
    if ignores:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    join()
    all_reduce()
    stamp(file, all_reduce=time.monotonic_ns())
    two_steps(work)
    stamp(file, steps=time.monotonic_ns())
    for _ in range(COLLECTIVES):
        all_reduce()
    one_step()
    if ATTEMPT == 0 and RANK == 1:
        if wait == "1":
            from standby_count import await_standbys

            await_standbys(os.getppid(), dist.get_world_size())
        stamp(file, fault=time.monotonic_ns())
        FAULTS[fault]()
    while ignores:
        signal.pause()
    dist.barrier()  # in the first attempt the survivor waits here when its peer dies
    dist.destroy_process_group()


main(*sys.argv[1:])
