"""What this process may use: standard descriptors, the ends of its children, open files, memory.

The agent raises its limit on open files as far as it may. Its workers keep the limit that the user has set: rank 0's agent holds
a connection for each client of the round's store, but a very high limit could harm a worker. select(2) takes no descriptor above
1,023, and some programs loop over all possible ones.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic_ext.base.open_files import MAX_FILES, limit, raise_limit

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_agents = 0  # how many agents of this process have raised the limit
_user_limit: tuple[int, int] | None = None  # the limit before the first agent raised it; None: it could not be raised

_UNLIMITED = 1 << 60  # "no limit" in cgroup v1 is a number near 2**63


def mend_start() -> None:
    """Mend what a launcher may hand down: closed standard descriptors, and an ignored SIGCHLD. Any thread may call this.

    Open /dev/null where stdin, stdout or stderr is closed, as under some init systems and `2>&-`. Else the next file or socket
    would get that number, and what is written to stderr would go there.
    Under Ray, SIGCHLD is ignored. Then the kernel drops the exit code of each child, here and in whatever this process starts.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except ValueError:  # not the main thread, where Python refuses it
            ctypes.CDLL(None).signal(int(signal.SIGCHLD), None)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


@contextmanager
def raised() -> Iterator[None]:
    """Raise the soft limit to the hard one, or to MAX_FILES if that is less, within the context."""
    global _agents, _user_limit
    with _lock:
        if not _agents:
            _user_limit = raise_limit()
        _agents += 1
    try:
        yield
    finally:
        with _lock:
            _agents -= 1
            if not _agents and _user_limit is not None:
                try:
                    resource.setrlimit(resource.RLIMIT_NOFILE, _user_limit)
                except (OSError, ValueError) as error:  # the hard limit was lowered
                    logger.info("cannot restore the limit on open files: %s", error)
                _user_limit = None


def restore_user_limit(pid: int) -> None:
    """Restore the user's limit in a process that this one has started."""
    with _lock:
        user_limit = _user_limit
    if user_limit is None:
        return
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, user_limit)
    except OSError as error:  # the process has ended, or now runs as another user
        logger.debug("cannot restore the limit on open files of process %s: %s", pid, error)


def files_left() -> int:
    """Return how many more files this process can open once its limit is raised."""
    now = limit()
    hard = MAX_FILES if now is None or now[1] == resource.RLIM_INFINITY else min(now[1], MAX_FILES)
    return hard - len(os.listdir("/proc/self/fd"))


def memory_left() -> int:
    """Return how many bytes can be allocated without swapping, within the limits of the host and of this process's cgroups."""
    return min([_host(), *_groups()])


def _host() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _groups() -> list[int]:
    """Return the bytes left in each cgroup that has a limit, as far as a container sees the tree."""
    left = []
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if (found := _left(folder, *names)) is not None:
                left.append(found)
            if folder == root:
                break
    return left


def _left(folder: Path, limit_file: str, used_file: str, reclaimable: str) -> int | None:
    try:
        limit, used = ((folder / name).read_text().strip() for name in (limit_file, used_file))
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - int(used) + int(statistics.get(reclaimable, 0)))
    except (OSError, ValueError):
        return None  # no limit at this level, or it is not readable


def proportional_set_size(pids: Iterable[int]) -> int:
    """Return how many bytes these processes use; a page that several of them share counts once (PSS)."""
    total = 0
    for pid in pids:
        # OSError: the process has ended, or runs as another user
        with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
            total += next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
    return total
