"""What the benchmark of lost nodes sees of a job: what its workers tell, and when processes begin and end."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Stamp:
    """See workers/stepping_job.py."""

    node: str
    pid: int
    rank: int
    world: int
    event: str
    ns: int


class Observer:
    """Hears what the workers tell and sees processes end: one loop, no polling.

    Attributes:
        first: the first step of each worker by pid. last: the last one. pause_ns: its longest time between two steps.
        made_ns, ended_ns: when a process was made and when it had ended, by pid; CLOCK_MONOTONIC.
        agents: when the agents had imported torch, by node.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.first: dict[int, Stamp] = {}
        self.last: dict[int, Stamp] = {}
        self.pause_ns: dict[int, int] = {}
        self.made_ns: dict[int, int] = {}
        self.ended_ns: dict[int, int] = {}
        self.agents: dict[str, int] = {}
        self._pids: dict[int, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def close(self) -> None:
        self._socket.close()
        for pidfd in self._pids:
            os.close(pidfd)

    def follow(self, pid: int) -> None:
        try:
            made_ns, pidfd = _made_ns(pid), os.pidfd_open(pid)
        except (ProcessLookupError, FileNotFoundError):  # it has ended and been reaped: a worker of a round that failed at once
            return
        self.made_ns[pid] = made_ns
        self._pids[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)

    def until(self, found: Callable[[], T | None], timeout_s: float) -> T | None:
        """Look and listen until there is something; None: not in time."""
        deadline = time.monotonic() + timeout_s
        while (seen := found()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            for fd, _ in self._poll.poll(left_s * 1000):
                self._take(fd)
        return seen

    def _take(self, fd: int) -> None:
        if fd in self._pids:
            pid = self._pids.pop(fd)
            self.ended_ns[pid] = time.monotonic_ns()
            self._poll.unregister(fd)
            os.close(fd)
            return
        stamp = Stamp(**json.loads(self._socket.recv(4096)))
        if stamp.event == "agent":
            self.agents[stamp.node] = stamp.ns
            return
        if stamp.pid not in self.first:
            self.first[stamp.pid] = stamp
            self.follow(stamp.pid)
        before = self.last.get(stamp.pid, stamp)
        self.pause_ns[stamp.pid] = max(self.pause_ns.get(stamp.pid, 0), stamp.ns - before.ns)
        self.last[stamp.pid] = stamp

    def training(self, world: int) -> dict[int, Stamp] | None:
        """The first steps, by rank, of a world of that size whose workers are all there; None while there is none."""
        there = {step.rank: step for step in self.first.values() if step.world == world and step.pid not in self.ended_ns}
        return there if len(there) == world else None


def _made_ns(pid: int) -> int:
    """When a process was made. The kernel tells it in ticks of CLOCK_BOOTTIME; see proc_pid_stat(5), field 22."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return int(after_name[19]) * 10**9 // os.sysconf("SC_CLK_TCK") - asleep_ns
