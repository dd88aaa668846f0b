"""What stopped workers have left running, in sessions of its own, that holds what the next round needs: it ends.

Anything else lives on: a script may start a cache server, MPS or `ray start` for all rounds to come. After the agent's death, or
when the job fails, all of it goes: see `reaper`.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from elastic_ext.workers import reaper

logger = logging.getLogger(__name__)

GPU = re.compile(r"/dev/(nvidia\d+|dri/renderD\d+|kfd|accel(/accel)?\d+|davinci\d+)")
SHARES_GPUS = "nvidia-cuda-mps"  # how the names of its control daemon and server begin
END_S = 10.0  # for all of them together; a driver may have much to release
LISTENING = "0A"  # include/net/tcp_states.h
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True)
class Needs:
    """What a round needs, besides the GPUs. port: of its store. directories: of checkpoints, as absolute paths without links."""

    port: int
    directories: tuple[str, ...] = ()


def reason(name: str, files: Collection[str], ports: Collection[int], needs: Needs) -> str:
    """Return what a process holds that the next round needs; "" if nothing. Pure.

    name: its short one, of 15 characters at most. files: the paths of what it has open. ports: on which it listens.
    """
    below = tuple(f"{each.rstrip('/')}/" for each in needs.directories)
    for path in files:
        if GPU.fullmatch(path) and not name.startswith(SHARES_GPUS):
            return f"the GPU {path}"
        if path.startswith(below) and below:
            return path
    return f"port {needs.port}" if needs.port in ports else ""


def end(token: str, needs: Needs, groups: Collection[int]) -> None:
    """End what the workers of an agent have left that holds what is needed, and wait for its end. No worker runs.

    token: the agent's. groups: process groups that have just been killed: their ends are no news.
    """
    deadline = time.monotonic() + END_S
    for process in reaper.marked(token.encode(), by_environment=False):
        pid, name = process.pid, _name(process.pid)
        with suppress(OSError):  # it has just ended, or is another user's
            files = list(_open_files(pid))
            why = reason(name, files, _ports(pid, files), needs)
            if not why or reaper.is_tracker(pid) or not process.kill():
                continue
            known = _group(pid) in groups
            while not (ended := process.wait(left := max(0.0, deadline - time.monotonic()))) and left:
                pass
            if not known or not ended:
                level, then = (logging.WARNING, "it was killed") if ended else (logging.ERROR, "it does not end after SIGKILL")
                logger.log(level, "a worker has left process %s (%s) running, which holds %s: %s", pid, name, why, then)


def _name(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""


def _group(pid: int) -> int:
    fields = reaper.stat_fields(pid)
    return int(fields[2]) if fields else 0


def _open_files(pid: int) -> Iterator[str]:
    """Raises OSError: it has ended, or is another user's."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # just closed
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def _ports(pid: int, files: Iterable[str]) -> frozenset[int]:
    """Return the TCP ports on which a process listens. files: what it has open. Raises OSError."""
    sockets = {found[1] for each in files if (found := _SOCKET.fullmatch(each))}
    return frozenset(port for inode, port in _listening(pid) if inode in sockets) if sockets else frozenset()


def _listening(pid: int) -> Iterator[tuple[str, int]]:
    """Yield inode and port of all listening sockets in the network namespace of a process; see proc_pid_net(5)."""
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError), open(f"/proc/{pid}/net/{table}", encoding="ascii") as lines:
            for fields in map(str.split, lines):
                if fields[3] == LISTENING:
                    yield fields[9], int(fields[1].rpartition(":")[2], 16)
