"""What node_loss.py sees of a job: the steps that its workers report, and when processes begin and end."""

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
class WorkerEvent:
    """One message of workers/stepping_job.py or workers/reporting_torchrun.py.

    Attributes:
        node: the variable NODE of the sender.
        rank, world: of the sender's process group; -1 and 0 for an agent.
        event: "step": an all_reduce is done; "agent": an agent has imported torch.
        ns: CLOCK_MONOTONIC, which all processes of a Linux machine share, also across network namespaces.
    """

    node: str
    pid: int
    rank: int
    world: int
    event: str
    ns: int


class JobEvents:
    """Receives the workers' messages and sees processes end, without polling.

    Attributes:
        path: of the socket to send to.
        first, last: the first and the last step of each worker, by pid.
        pause_ns: the longest time between two steps of each worker, by pid.
        made_ns, ended_ns: when a process was made and when it had ended, by pid; CLOCK_MONOTONIC.
        agents: when each agent had imported torch, by node.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.first: dict[int, WorkerEvent] = {}
        self.last: dict[int, WorkerEvent] = {}
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
        """Record when this process was made and when it ends."""
        try:
            made_ns, pidfd = _made_ns(pid), os.pidfd_open(pid)
        except (ProcessLookupError, FileNotFoundError):  # a worker of a round that failed at once: it has ended and been reaped
            return
        self.made_ns[pid] = made_ns
        self._pids[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)

    def until(self, found: Callable[[], T | None], timeout_s: float) -> T | None:
        """Receive events until `found` returns something, and return that; None: not in time."""
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
        event = WorkerEvent(**json.loads(self._socket.recv(4096)))
        if event.event == "agent":
            self.agents[event.node] = event.ns
            return
        if event.pid not in self.first:
            self.first[event.pid] = event
            self.follow(event.pid)
        before = self.last.get(event.pid, event)
        self.pause_ns[event.pid] = max(self.pause_ns.get(event.pid, 0), event.ns - before.ns)
        self.last[event.pid] = event

    def training(self, world: int) -> dict[int, WorkerEvent] | None:
        """The first steps, by rank, of a world of this size whose workers all run; None: there is none yet."""
        there = {step.rank: step for step in self.first.values() if step.world == world and step.pid not in self.ended_ns}
        return there if len(there) == world else None


def _made_ns(pid: int) -> int:
    """When a process was made. The kernel counts it in ticks of CLOCK_BOOTTIME; see proc_pid_stat(5), field 22."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return int(after_name[19]) * 10**9 // os.sysconf("SC_CLK_TCK") - asleep_ns
