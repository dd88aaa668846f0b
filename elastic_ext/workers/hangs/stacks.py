"""Gets the stacks of workers' threads. A worker writes them itself on a signal that its bootstrap handles."""

from __future__ import annotations

import logging
import os
import re
import select
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from elastic_ext.base.wakeup import milliseconds
from elastic_ext.workers import pidfds
from elastic_ext.workers.worker_env import ANSWER_SIGNAL, STACKS_SIGNAL

logger = logging.getLogger(__name__)

WAIT_S = 0.5  # a dump takes a few ms; a worker that is stopped or asleep in the kernel never makes one
QUIET_S = 0.02
_OURS = "/elastic_ext/workers/bootstrap/recorder.py"
_THREADS = re.compile(r"^(?=Thread 0x|Current thread 0x)", re.MULTILINE)


def dump(pid: int, path: str) -> str:
    """Make process `pid` append its stacks to the file `path`; return what it wrote, "" if nothing. Takes WAIT_S at most.

    Call this only for a worker whose progress row says that it handles the signal (`stacks_armed`). It would kill any other.
    """
    return dump_all({pid: path}).get(pid, "")


def dump_all(paths: Mapping[int, str]) -> dict[int, str]:
    """Do the same for several processes at once; return what each wrote, without those that wrote nothing. paths: by pid."""
    deadline = time.monotonic() + WAIT_S
    before = {pid: _size(path) for pid, path in paths.items()}
    sizes, writing, ends = dict(before), set(), select.poll()
    with _opened(paths) as pidfds_of:
        for pid, pidfd in pidfds_of.items():
            if _send(pidfd, pid, STACKS_SIGNAL):
                writing.add(pid)
                if pidfd is not None:
                    ends.register(pidfd, select.POLLIN)
        # A dump has no end mark: it is complete once the file has grown and then stays the same. An exit ends the wait early.
        while writing and time.monotonic() < deadline:
            ended = {descriptor for descriptor, _ in ends.poll(milliseconds(QUIET_S))}
            last, sizes = sizes, {pid: _size(path) for pid, path in paths.items()}
            done = {pid for pid in writing if pidfds_of[pid] in ended or before[pid] < sizes[pid] == last[pid]}
            for pid in done:
                if (pidfd := pidfds_of[pid]) is not None:
                    ends.unregister(pidfd)
            writing -= done
    return {pid: _read(path, before[pid]) for pid, path in paths.items() if _size(path) > before[pid]}


def empty(path: str) -> None:
    """Discard what a worker has written to this file. It goes on at the new end, because it appends."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError as error:
        logger.debug("cannot empty %s: %s", path, error)


def ask(pid: int) -> bool:
    """Ask the main thread of process `pid` to answer as soon as it runs Python code; return whether it was asked.

    Not asked: one that blocks the signal, because it would not answer whatever it does.
    Call this only for a worker whose progress row says that it answers (`answers`), which is also where it does.
    """
    with _opened([pid]) as pidfds_of:
        return pid in pidfds_of and not _has(pid, "SigBlk", ANSWER_SIGNAL) and _send(pidfds_of[pid], pid, ANSWER_SIGNAL)


@contextmanager
def _opened(pids: Iterable[int]) -> Iterator[dict[int, int | None]]:
    """A pidfd of each process, or None; see pidfds.of. Without those that have ended, or for which no descriptor is left.

    Not pidfds.watch: without pidfds, each call would leave a thread until the process ends.
    """
    found: dict[int, int | None] = {}
    try:
        for pid in pids:
            try:
                found[pid] = pidfds.of(pid)
            except OSError as error:
                logger.debug("cannot signal process %s: %s", pid, error)
        yield found
    finally:
        for pidfd in found.values():
            if pidfd is not None:
                os.close(pidfd)


def _send(pidfd: int | None, pid: int, number: int) -> bool:
    """Send the signal if the process still has a handler. After exec() it has none, but its progress row still claims one."""
    try:
        if not _has(pid, "SigCgt", number):
            return False
        pidfds.send(pidfd, pid, number)
    except OSError:  # it has ended
        return False
    return True


def _has(pid: int, mask: str, number: int) -> bool:
    """Return whether a mask of signals in proc_pid_status(5) has this one; False if the process has ended."""
    try:
        with open(f"/proc/{pid}/status") as status:
            found = next(line for line in status if line.startswith(f"{mask}:")).split()[1]
    except (OSError, StopIteration):
        return False
    return bool(int(found, 16) >> (number - 1) & 1)


def _read(path: str, start: int) -> str:
    with open(path, "rb") as file:
        file.seek(start)
        return without_our_thread(file.read().decode(errors="replace"))


def without_our_thread(text: str) -> str:
    """Return stacks without the thread of the bootstrap, which says nothing about the script."""
    return "".join(thread for thread in _THREADS.split(text) if _OURS not in thread)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0
