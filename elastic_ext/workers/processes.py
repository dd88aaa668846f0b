"""Processes of an agent: descriptors that become readable when a child ends, and the workers of one round.

The descriptors are pidfds, or else a pipe and a thread: Linux before 5.4 has no pidfds, some seccomp profiles refuse
them, and an interpreter may have been built against old headers. Only for children that this process has not reaped, so that no
other process can have their pids.

So nothing polls: exits of workers are seen at once, and all are stopped within a deadline. Exits are read without reaping
(WNOWAIT): torch's process contexts reap, and while a zombie holds its pid, a signal to its process group cannot hit an unrelated
process.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_ext.base.torch_private import reraise_signals
from elastic_ext.base.wakeup import Wakeup, milliseconds
from elastic_ext.workers import progress, reaper

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

logger = logging.getLogger(__name__)

_FLAGS = 6  # fields after the name of the process in /proc/PID/stat, see proc_pid_stat(5)
_PF_EXITING = 0x4  # include/linux/sched.h
TRACER_WAIT_S = 0.02
TRACKERS_S = 1.0  # for resource trackers to end after all others of their groups: they need milliseconds
_REFUSED = (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL)


@functools.cache
def why_unavailable() -> str | None:
    """Return why pidfds do not work here; None if they do. Raises OSError if a temporary shortage prevents the answer."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except AttributeError:
        return "this Python was built without os.pidfd_open"
    except OSError as error:
        return _refusal("pidfd_open", error)
    try:
        signal.pidfd_send_signal(pidfd, 0)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None  # a process is not its own child: the kernel supports the call
    except AttributeError as error:
        return f"this Python was built without a call for pidfds: {error}"
    except OSError as error:
        return _refusal("pidfd_send_signal or waitid", error)
    finally:
        os.close(pidfd)
    return None


def _refusal(call: str, error: OSError) -> str:
    """Return a reason for the log. Raises the error if it is temporary, such as a shortage of descriptors."""
    if error.errno not in _REFUSED:
        raise error
    reason = f"{call} is refused ({error.strerror})"
    logger.info("no pidfds, so threads wait for processes to end: %s", reason)
    return reason


def of(pid: int) -> int | None:
    """Return a pidfd of this child; None if there are no pidfds, but `send` reaches it all the same. Raises as `watch` does."""
    if why_unavailable() is None:
        return os.pidfd_open(pid)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError as error:
        if state(pid) in ("", "Z", "X"):
            raise ProcessLookupError(errno.ESRCH, f"no child {pid}") from error
        raise OSError(errno.ENOTSUP, f"cannot watch process {pid}: it is not our child, and {why_unavailable()}") from error
    return None


def watch(pid: int) -> int:
    """Return a descriptor that becomes readable when this child has ended. The caller closes it.

    Raises ProcessLookupError: it has ended and was reaped; OSError: ENOTSUP if there are no pidfds and this is not a child of
    this process (start method forkserver), another errno if no descriptor or thread is available.
    """
    pidfd = of(pid)
    if pidfd is not None:
        return pidfd
    ours, theirs = os.pipe()
    try:
        threading.Thread(target=_await_end, args=(pid, theirs), name="elastic_ext_end", daemon=True).start()
    except RuntimeError as error:
        os.close(ours)
        os.close(theirs)
        raise OSError(errno.EAGAIN, str(error)) from error
    return ours


def _await_end(pid: int, writer: int) -> None:
    with suppress(ChildProcessError):  # it was already reaped
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with suppress(OSError):  # no thread waits anymore
        os.write(writer, b".")  # closing it is not enough: a forked process may hold another copy
    os.close(writer)


def send(descriptor: int | None, pid: int, sig: int) -> None:
    """Send a signal to the child behind a descriptor from `watch` or `of`. Raises ProcessLookupError, PermissionError."""
    if descriptor is not None and why_unavailable() is None:
        signal.pidfd_send_signal(descriptor, sig)
    else:
        os.kill(pid, sig)


def status(descriptor: int, pid: int) -> os.waitid_result | None:
    """Return how this child ended, without reaping it; None if it has not. Raises ChildProcessError if it was reaped."""
    which = (os.P_PIDFD, descriptor) if why_unavailable() is None else (os.P_PID, pid)
    return os.waitid(*which, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def state(pid: int) -> str:
    """Return the state of a process, a letter from proc_pid_stat(5); "" if there is no such process."""
    return next(iter(reaper.stat_fields(pid)), "")


def is_ending(pid: int) -> bool:
    """Return whether this child, which has not been reaped, has begun to end, or has ended. False if the kernel does not say.

    The kernel marks a process before it closes its connections and devices, and reports its end only afterwards: seconds later
    where a driver has much to release.
    """
    fields = reaper.stat_fields(pid)
    return len(fields) > _FLAGS and bool(int(fields[_FLAGS]) & _PF_EXITING)


@dataclass(frozen=True)
class Exit:
    local_rank: int
    pid: int
    # as in subprocess: negative for the signal that killed it; None if it cannot be known (the worker is not a child of this
    # process: start method forkserver)
    exitcode: int | None
    # time.monotonic_ns() when the agent first sent the worker a signal to end; None if it never did, if it was ending by then, or
    # if a signal that the agent had not sent ended it
    stop_sent_ns: int | None
    seen_ns: int  # time.monotonic_ns() when the agent saw the exit

    @property
    def failed(self) -> bool:
        return self.exitcode != 0

    def ended_by_agent(self, raised_ns: int | None) -> bool:
        """Return whether the worker ended because the agent asked it to.

        raised_ns: time.monotonic_ns() when it raised the exception that ended it; None if there was no exception. An exception
        raised in answer to our signal is how the worker ended, not why.
        """
        return self.stop_sent_ns is not None and (raised_ns is None or raised_ns >= self.stop_sent_ns)


@dataclass(frozen=True)
class StopLimit:
    """When the workers must be gone. That time may come nearer while they end.

    wakeup: set when it changes. stop_by: returns it, in monotonic seconds; None: there is none. Ask after `clear`, not before.
    """

    wakeup: Wakeup
    stop_by: Callable[[], float | None]

    def fileno(self) -> int:
        return self.wakeup.fileno()

    def clear(self) -> None:
        reraise_signals(self.wakeup.clear())


class WorkerProcesses:
    """The processes of one round, by local rank.

    Invariant: a pidfd is open for each worker from start() to close(), so a signal never reaches a reused pid.
    """

    def __init__(self, pids: Mapping[int, int], own_groups: bool) -> None:
        """Start to watch processes. Raises OSError if no descriptor is left.

        pids: by local rank. own_groups: each worker leads its own process group, as commands started by torch do.
        """
        self.pids = dict(pids)
        self._own_groups = own_groups
        self._pidfds: dict[int, int] = {}
        self._stop_sent_ns: dict[int, int] = {}
        self._sent: dict[int, set[int]] = {}
        self._cut_short: dict[int, int] = {}  # the exit codes of workers that were killed after their exit handlers
        self._only_cut_short: set[int] = set()  # those that had got no signal to end before
        self._ending_before: set[int] = set()  # those that were ending when they first got one
        self.stopped = False  # after stop() torch may reap, so no signal is sent to any of these pids again
        self.exits: dict[int, Exit] = {}
        try:
            for local_rank, pid in self.pids.items():
                try:
                    self._pidfds[local_rank] = watch(pid)
                except ProcessLookupError:  # it has ended, and multiprocessing reaps whenever it starts a process
                    self.exits[local_rank] = Exit(local_rank, pid, None, None, time.monotonic_ns())
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Stop watching. Sends no signal."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])  # popped first: if a signal interrupts this, it is called again

    @property
    def running(self) -> list[int]:
        """Local ranks of the workers whose exits have not been seen."""
        return [local_rank for local_rank in self._pidfds if local_rank not in self.exits]

    @property
    def failed(self) -> bool:
        return any(exit_.failed for exit_ in self.exits.values())

    def wait(self, timeout_s: float | None, *others: FileDescriptorLike) -> None:
        """Block until a running worker ends, one of `others` is readable or the timeout expires; then record the exits."""
        poll = select.poll()
        for local_rank in self.running:
            poll.register(self._pidfds[local_rank], select.POLLIN)
        for other in others:
            poll.register(other, select.POLLIN)
        poll.poll(None if timeout_s is None else milliseconds(timeout_s))
        self.poll()

    def poll(self) -> None:
        """Record the exits so far, without blocking."""
        by_pidfd = {self._pidfds[local_rank]: local_rank for local_rank in self.running}
        poll = select.poll()
        for pidfd in by_pidfd:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(0):
            local_rank = by_pidfd[pidfd]
            ended, exitcode = _exitcode(pidfd, self.pids[local_rank])
            if not ended:
                select.select([], [], [], TRACER_WAIT_S)  # so that wait() does not spin
                continue
            stop_sent_ns = self._stop_sent_ns.get(local_rank)
            if exitcode == -signal.SIGKILL and local_rank in self._cut_short:
                exitcode = self._cut_short[local_rank]
                stop_sent_ns = None if local_rank in self._only_cut_short else stop_sent_ns
            elif local_rank in self._ending_before:
                stop_sent_ns = None  # a signal of ours that it died of was another one's, too
            elif exitcode is not None and exitcode < 0:
                stop_sent_ns = stop_sent_ns if -exitcode in self._sent.get(local_rank, ()) else None
            self.exits[local_rank] = Exit(local_rank, self.pids[local_rank], exitcode, stop_sent_ns, time.monotonic_ns())

    def stop(
        self,
        grace_s: float,
        on_stragglers: Callable[[list[int]], None],
        ending: progress.EndingWorkers | None = None,
        limit: StopLimit | None = None,
        at_once: Collection[int] = (),
    ) -> None:
        """End all workers: send SIGTERM now, and SIGKILL to those that are left after `grace_s` seconds.

        Returns when all have ended. If one sleeps in the kernel and outlives even SIGKILL, returns after another `grace_s`.

        on_stragglers: called with the local ranks that outlived the grace period, before they are killed. ending: workers that
        end by themselves. They do not get SIGTERM, but SIGKILL once their exit handlers are done. limit: may shorten the grace
        period at any time. at_once: those of the other workers that get SIGKILL now.
        """
        ending_codes = ending.exit_codes() if ending is not None else {}
        asked = [local_rank for local_rank in self.running if local_rank not in ending_codes]
        self._signal([local_rank for local_rank in asked if local_rank not in at_once], signal.SIGTERM)
        self._kill([local_rank for local_rank in asked if local_rank in at_once])
        self._await_all(grace_s, ending, limit)
        if stragglers := self.running:
            on_stragglers(stragglers)
        # Also signal the groups of dead workers: what a worker started must not outlive it. Their leaders are zombies until torch
        # reaps them. A worker that succeeded unasked left its processes behind on purpose.
        ended_well = {rank for rank, exit_ in self.exits.items() if not exit_.failed and exit_.stop_sent_ns is None}
        groups = [rank for rank in self._pidfds if rank not in ended_well]
        self._kill(groups)
        self._await_all(max(grace_s, 1.0))
        self.stopped = True
        for local_rank in self.running:
            logger.error(
                "worker %s (pid %s) did not end after SIGKILL: it is asleep in the kernel; this host may need a reboot",
                local_rank,
                self.pids[local_rank],
            )

    def _await_all(self, timeout_s: float, ending: progress.EndingWorkers | None = None, limit: StopLimit | None = None) -> None:
        deadline = time.monotonic() + timeout_s
        changes = [each for each in (ending, limit) if each is not None]
        while self.running:
            if limit is not None:
                limit.clear()
                by = limit.stop_by()
                deadline = deadline if by is None else min(deadline, by)
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if ending is not None:
                self._cut_short_past_exit_handlers(ending)
            self.wait(left, *changes)

    def _cut_short_past_exit_handlers(self, ending: progress.EndingWorkers) -> None:
        ending.clear()  # before `past_exit_handlers`
        past = {rank: code for rank, code in ending.past_exit_handlers().items() if rank in self.running}
        self._cut_short.update(past)
        self._only_cut_short |= past.keys() - self._stop_sent_ns.keys()
        self._signal([rank for rank in past if signal.SIGKILL not in self._sent.get(rank, ())], signal.SIGKILL)

    def _kill(self, local_ranks: Collection[int]) -> None:
        self._kill_all_but_trackers(local_ranks)
        self._signal(local_ranks, signal.SIGKILL)

    def _kill_all_but_trackers(self, local_ranks: Collection[int]) -> None:
        """Where a worker has resource trackers, kill the rest of its group, and wait for them: see `reaper.is_tracker`."""
        members = _members({self.pids[rank] for rank in local_ranks}) if self._own_groups else []
        try:
            trackers = [each for each in members if reaper.is_tracker(each.pid)]
            if not trackers:
                return
            self._signal([rank for rank in local_ranks if rank not in self.exits], signal.SIGKILL, whole_group=False)
            for each in members:
                if each not in trackers:
                    each.kill()
            deadline = time.monotonic() + TRACKERS_S
            for each in trackers:
                while not each.wait(left := max(0.0, deadline - time.monotonic())) and left:
                    pass
        finally:
            for each in members:
                each.close()

    def _signal(self, local_ranks: Iterable[int], sig: signal.Signals, whole_group: bool = True) -> None:
        for local_rank in list(local_ranks):
            if local_rank not in self.exits:
                # Its connections close before its exit can be seen, so the failure of another worker may be known before its own.
                if local_rank not in self._stop_sent_ns and is_ending(self.pids[local_rank]):
                    self._ending_before.add(local_rank)
                self._stop_sent_ns.setdefault(local_rank, time.monotonic_ns())
                self._sent.setdefault(local_rank, set()).add(sig)
            try:
                if self._own_groups and whole_group:
                    os.killpg(self.pids[local_rank], sig)
                else:
                    send(self._pidfds[local_rank], self.pids[local_rank], sig)
            except ProcessLookupError:
                pass  # it has just ended
            except PermissionError as error:
                logger.warning("cannot send %s to worker %s (pid %s): %s", sig.name, local_rank, self.pids[local_rank], error)


def build_locks(pids: Iterable[int]) -> dict[str, os.stat_result]:
    """Return the lock files of builds of C++ extensions that these processes hold, by path.

    Up to torch 2.13, `torch.utils.cpp_extension` locks a build by a file that exists: one that is killed does not remove it, and
    each later build waits for it without end (pytorch/pytorch#189245).
    """
    found = {}
    for pid in pids:
        with suppress(OSError):  # it has just ended
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # it has just closed that
                    path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if path.endswith("/lock") and os.path.exists(f"{os.path.dirname(path)}/build.ninja"):
                        found[path] = os.stat(f"/proc/{pid}/fd/{descriptor}")
    return found


def remove_build_locks(held: Mapping[str, os.stat_result]) -> None:
    """Remove these lock files, now that their holders have ended, unless another process holds one by now."""
    for path, then in held.items():
        with suppress(OSError):  # its holder removed it
            now = os.stat(path)
            if (now.st_dev, now.st_ino, now.st_ctime_ns) == (then.st_dev, then.st_ino, then.st_ctime_ns):
                os.unlink(path)
                logger.info("removed the lock file of a build in which a worker was stopped: %s", path)


def _members(groups: Collection[int]) -> list[reaper.ExactProcess]:
    """Open the processes of these groups, without their leaders. The caller closes them.

    Without descriptors, some are missing: the groups are killed all the same.
    """
    found: list[reaper.ExactProcess] = []
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError as error:
        logger.warning("cannot list processes, so shared memory of killed workers may stay in /dev/shm: %s", error)
        return found
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):  # it has just ended, or is not ours
            if pid not in groups and os.getpgid(pid) in groups:
                found.append(reaper.ExactProcess(pid))
                if os.getpgid(pid) not in groups:  # it may be another one than the one that was opened
                    found.pop().close()
    return found


def _exitcode(pidfd: int, pid: int) -> tuple[bool, int | None]:
    """Return whether a process has ended, and its exit code if that can be known.

    A pidfd is readable when the process ends; under a tracer (strace, gdb), its parent learns of the end slightly later.
    """
    try:
        result = status(pidfd, pid)
    except ChildProcessError:
        return True, None
    if result is None:
        return False, None
    return True, result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
