"""The processes of a job by what they are, as /proc shows them, whatever started them and wherever they moved to."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_CLONE_NEWNS = 0x00020000  # linux/sched.h

# By a part of the command line; the first that is found holds. A standby's server and the standbys show the same one.
_ROLES = (
    ("workers/reaper", "reaper"),
    ("workers/relay", "relay"),
    ("replicate", "copier"),
    ("standby/server", "standby server"),
    ("own_etcd.keeper", "keeper"),
    ("embedded.process", "store"),
)


@dataclass(frozen=True)
class Process:
    """role: "" where it is not known, e.g. between fork and exec."""

    pid: int
    parent: int
    state: str
    role: str
    command: tuple[str, ...]

    def send(self, number: int) -> bool:
        """False: it has ended."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def adopt_orphans() -> None:
    """From now on each orphaned descendant is a child of this process: nothing that the job leaves behind goes unseen."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def own_shared_memory() -> bool:
    """A /dev/shm of this process and its children alone: what others put into theirs is not to be seen. False: not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return False
    for command in (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]):
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return False
    return True


def descendants(root: int) -> Iterator[Process]:
    """Of a process, without the ones that have ended."""
    return (each for each in _tree(root) if each.state not in "ZX")


def zombies(root: int) -> Iterator[tuple[Process, Process]]:
    """Descendants that have ended and that nobody has waited for, each with its parent; no children of root itself."""
    found = {each.pid: each for each in _tree(root)}
    return ((each, found[each.parent]) for each in found.values() if each.state == "Z" and each.parent in found)


def _tree(root: int) -> Iterator[Process]:
    children = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := _read(int(name))) is not None:
            children[found.parent].append(found)
    waiting = list(children[root])
    while waiting:
        process = waiting.pop()
        waiting += children[process.pid]
        yield process


def _read(pid: int) -> Process | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = tuple(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
    except OSError:
        return None
    return Process(pid, int(fields[1]), fields[0], _role(pid, command), command)


def _role(pid: int, command: tuple[str, ...]) -> str:
    if "elastic_ext.agent" in command:
        return "agent"
    program = " ".join(command)
    role = next((role for part, role in _ROLES if part in program), "")
    if role == "standby server" and not os.path.exists(f"/proc/{pid}/fd/{command[-1]}"):
        return "standby"  # it has closed the server's socket
    return role


def reap_orphans(known: set[int]) -> None:
    """Those that have ended and that nobody else here waits for. known: pids that somebody waits for."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for pid in map(int, children):
        if pid not in known:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


def kill_all(root: int) -> list[Process]:
    """All descendants; return those that there were."""
    killed = []
    while found := list(descendants(root)):
        for process in found:
            process.send(signal.SIGCONT)
            process.send(signal.SIGKILL)
        killed += found
        reap_orphans(set())
    return killed
