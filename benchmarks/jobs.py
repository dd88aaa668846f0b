"""Runs one job under ours or stock torchrun, to its end or to a deadline. Nothing of it survives that."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAULTY_JOB = Path(__file__).with_name("workers") / "faulty_job.py"
MAX_RESTARTS = 3

OURS = ("--rdzv-backend=ext_c10d", "--rdzv-endpoint=localhost:0")
AGENTS: Mapping[str, tuple[str, ...]] = {
    "warm": OURS,
    "ours": OURS,
    "stock": ("--standalone",),
}

DEVICE = "JOB_DEVICE"  # of the workers, see workers/device.py
TERM_GRACE_S = 10.0  # from SIGTERM to SIGKILL; stock may need 30 s to clean up
TAIL = 4000  # characters of output kept
REAPER = "reaper.py"  # elastic_ext.workers.reaper
_FOREIGN = ("ELASTIC_EXT_", "TORCHELASTIC_", "PET_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Stamp:
    """One line of a stamps file, which workers/faulty_job.py describes. ns: CLOCK_MONOTONIC."""

    attempt: int
    rank: int
    event: str
    ns: int


@dataclass(frozen=True)
class JobEnd:
    """returncode: None if the job was killed at the deadline. output: the end of its stdout and stderr."""

    returncode: int | None
    stamps: tuple[Stamp, ...]
    output: str


def run_faulty(
    agent: str, fault: str, timeout_s: float, work: str = "none", workers: int = 2, standbys: bool = False, **variables: str
) -> JobEnd:
    """Run workers/faulty_job.py. agent: a key of AGENTS. standbys: the fault waits until they are ready."""
    with tempfile.TemporaryDirectory() as directory:
        stamps = Path(directory, "stamps")
        torchrun = (sys.executable, "-m", "torch.distributed.run", *AGENTS[agent])
        options = (f"--nproc-per-node={workers}", f"--max-restarts={MAX_RESTARTS}")
        command = [*torchrun, *options, str(FAULTY_JOB), fault, str(stamps), work, str(int(standbys))]
        with open(Path(directory, "output"), "w+", errors="replace") as output:
            returncode = run(command, directory, environment(**variables), output, timeout_s)
            output.seek(0)
            return JobEnd(returncode, read_stamps(stamps), output.read()[-TAIL:])


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device, which takes effect at once: workers find it in their environment."""

    class Set(argparse.Action):
        def __call__(self, parser: object, namespace: object, values: Any, option: object = None) -> None:
            os.environ[DEVICE] = values

    parser.add_argument("--device", choices=("cpu", "cuda"), action=Set, help="of the workers; default: cpu")


def device() -> str:
    """Where the workers compute, for the JSON line."""
    if os.environ.get(DEVICE, "cpu") == "cpu":
        return "cpu"
    import torch

    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def read_stamps(path: Path) -> tuple[Stamp, ...]:
    """The stamps that a job has left; none if there is no file."""
    if not path.exists():
        return ()
    return tuple(Stamp(**json.loads(line)) for line in path.read_text().splitlines())


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without variables that change either agent. Both log errors only; ours has its metrics on."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {
        **env,
        "OMP_NUM_THREADS": "1",
        "LOGLEVEL": "ERROR",
        "ELASTIC_EXT_METRICS_PORT": "0",
        "ELASTIC_EXT_STANDBY": "on",
        **variables,
    }


def run(command: list[str], cwd: str, env: dict[str, str], output: Any, timeout_s: float) -> int | None:
    """Return the exit code; None: the command was killed at the deadline. All its descendants are dead afterwards."""
    return run_all([command], cwd, env, output, timeout_s)[0]


def run_all(commands: Sequence[list[str]], cwd: str, env: dict[str, str], output: Any, timeout_s: float) -> list[int | None]:
    """Run commands beside each other; see `run`. The deadline is that of all together."""
    adopt_orphans()
    processes: list[subprocess.Popen[Any]] = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            )
        in_time = _end_within(processes, timeout_s)
        late = [process for process, ended in zip(processes, in_time, strict=True) if not ended]
        for process in late:
            process.send_signal(signal.SIGTERM)
        _end_within(late, TERM_GRACE_S)
        return [process.wait() if ended else None for process, ended in zip(processes, in_time, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        kill_children()


def _end_within(processes: Sequence[subprocess.Popen[Any]], timeout_s: float) -> list[bool]:
    """Wait for all of them; return which have ended in time."""
    deadline = time.monotonic() + timeout_s
    return [_ends_within(process, deadline - time.monotonic()) for process in processes]


def _ends_within(process: subprocess.Popen[Any], timeout_s: float) -> bool:
    pidfd = os.pidfd_open(process.pid)
    try:
        return bool(select.select([pidfd], [], [], max(0.0, timeout_s))[0])
    finally:
        os.close(pidfd)


def adopt_orphans() -> None:
    """Make every orphaned descendant, whatever session or group it has moved to, a child of this process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed: cannot kill the processes that a job leaves behind"
        )


def kill_children() -> None:
    """Kill and reap the children of this process until none is left. The death of one can bring its own children.

    What an agent keeps in memory goes with it.
    """
    pid = os.getpid()
    kept: set[str] = set()
    while children := [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]:
        kept |= private_directories([*children, *(each for child in children for each in descendants(child))])
        for child in children:
            os.kill(child, signal.SIGKILL)  # the pid cannot have been reused: a child keeps it until it is reaped
        for child in children:
            os.waitpid(child, 0)
    for each in kept:
        shutil.rmtree(each, ignore_errors=True)


def descendants(pid: int) -> Iterator[int]:
    """The pids of all processes that a process has started, and those of theirs."""
    try:
        found = [int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]
    except OSError:
        return
    for each in found:
        yield each
        yield from descendants(each)


def kill_whole(pid: int) -> None:
    """Kill a process and all its descendants as if they were one: none of them can act on the death of another.

    What an agent keeps in memory goes with it, as that of a host that is gone.
    """
    pids = [pid, *descendants(pid)]
    kept = private_directories(pids)
    for sig in (signal.SIGSTOP, signal.SIGKILL):
        for each in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(each, sig)
    for each in kept:
        shutil.rmtree(each, ignore_errors=True)


def private_directories(pids: Iterable[int]) -> set[str]:
    """The private directories of the agents whose reapers are among these processes.

    A reaper names its agent's, as its last argument. The names alone do not show it: agents that are not ours have such, too.
    """
    found = set()
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
        except OSError:  # it has ended
            continue
        if any(os.path.basename(word) == REAPER for word in words):
            found.add(words[-1])
    return found
