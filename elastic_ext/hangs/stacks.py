"""What a worker's threads do now: it writes their stacks itself, on a signal that its bootstrap handles. Does it only wait?

Where the call may do anything (`loss.item()`, the backward pass, a launch), torch's flight recorder decides: a worker waits if it
has a collective that does not complete and no other Python thread computes.

Neither processor time nor one stack is enough. NCCL waits spin, as work does, and a healthy evaluation may spend most of its time
in the same line of the same short collective. So `CallChecks` asks twice. First for an answer: worker_env.ANSWER_SIGNAL, which
the main thread counts as soon as it runs Python code. Then for the stacks, which faulthandler writes while the main thread is
in C. As long as the answer is missing, the main thread has not left the call that the stacks show. It needs neither luck nor more
signals. Only a worker that has answered before is trusted: FirstAnswers asks each once it has started.

Also, nothing else of the worker's family may do what others could wait for: no bytes, no disk, no new connection of the worker
itself, no other process that computes, and no other Python thread that may use the processor. Threads without Python code may:
NCCL's own spin, too.

Each signal interrupts a worker for less than a millisecond; system calls restart, or return EINTR where the kernel never restarts
them, which Python and torch retry. A main thread that waits for a signal (signal.pause) would go on after ours: it gets none, and
so stays in no call. A worker that stays gets two signals, and one before its node claims a stall. One that does its own part gets
two more after FIRST_GAP_S, then after twice as long, up to LONGEST_GAP_S; a new connection resets that.
"""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from elastic_ext.base import files, wakeup
from elastic_ext.hangs import detector, process_stats
from elastic_ext.workers import processes, worker_env
from elastic_ext.workers.progress import Progress, ProgressTable

logger = logging.getLogger(__name__)

WAIT_S = 0.5  # a dump takes a few ms; a worker that is stopped or asleep in the kernel never makes one
QUIET_S = 0.02
_OURS = "/elastic_ext/workers/bootstrap/recorder.py"
FIRST_GAP_S, LONGEST_GAP_S = 5.0, 60.0
RECORDED_S = 5.0  # the worker reads its recorder every 2 s
RATES_S = 2.0  # over less time, the stacks that the worker writes would count as its work


def dump(pid: int, path: str) -> str:
    """Make process `pid` append its stacks to the file `path`; return what it wrote, "" if nothing. Takes WAIT_S at most.

    Call this only for a worker whose progress row says that it handles the signal (`stacks_armed`). It would kill any other.
    """
    return dump_all({pid: path}).get(pid, "")


def dump_all(paths: Mapping[int, str], wait_s: float = WAIT_S) -> dict[int, str]:
    """Do the same for several processes at once; return what each wrote, without those that wrote nothing. paths: by pid."""
    deadline = time.monotonic() + wait_s
    before = {pid: files.size(path) for pid, path in paths.items()}
    sizes, writing, ends = dict(before), set(), select.poll()
    with _opened(paths) as pidfds_of:
        for pid, pidfd in pidfds_of.items():
            if _send(pidfd, pid, worker_env.STACKS_SIGNAL):
                writing.add(pid)
                if pidfd is not None:
                    ends.register(pidfd, select.POLLIN)
        # A dump has no end mark: it is complete once the file has grown and then stays the same. An exit ends the wait early.
        while writing and time.monotonic() < deadline:
            ended = {descriptor for descriptor, _ in ends.poll(wakeup.milliseconds(QUIET_S))}
            last, sizes = sizes, {pid: files.size(path) for pid, path in paths.items()}
            done = {pid for pid in writing if pidfds_of[pid] in ended or before[pid] < sizes[pid] == last[pid]}
            for pid in done:
                if (pidfd := pidfds_of[pid]) is not None:
                    ends.unregister(pidfd)
            writing -= done
    return {pid: _read(path, before[pid]) for pid, path in paths.items() if files.size(path) > before[pid]}


def empty(path: str) -> None:
    """Discard what a worker has written to this file. It goes on at the new end, because it appends."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError as error:
        logger.debug("cannot empty %s: %s", path, error)


def ask(pid: int) -> bool:
    """Ask the main thread of process `pid` to answer as soon as it runs Python code; return whether it was asked.

    Not asked: one that blocks the signal, because it would not answer in any case.
    Call this only for a worker whose progress row says that it answers (`answers`), which is also where it does.
    """
    with _opened([pid]) as pidfds_of:
        number = worker_env.ANSWER_SIGNAL
        return pid in pidfds_of and not _has(pid, "SigBlk", number) and _send(pidfds_of[pid], pid, number)


@contextmanager
def _opened(pids: Iterable[int]) -> Iterator[dict[int, int | None]]:
    """A pidfd of each process, or None; see processes.of. Without those that have ended, or for which no descriptor is left.

    Not processes.watch: without pidfds, each call would leave a thread until the process ends.
    """
    found: dict[int, int | None] = {}
    try:
        for pid in pids:
            try:
                found[pid] = processes.of(pid)
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
        processes.send(pidfd, pid, number)
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
    return "".join(thread for thread in detector.threads(text) if _OURS not in thread)


@dataclass(frozen=True)
class Stay:
    """A worker that has not left its call."""

    since: float  # monotonic seconds
    wait: detector.WaitFor  # what the call waits for
    answers: int  # see Progress; another count means that it has left the call
    others_idle: bool  # its other Python threads waited for work when this began
    stats: process_stats.ProcessStats  # of its family, when this began
    confirmed: bool = False  # they did when the node was about to claim a stall, too
    outstanding_ns: int = 0  # see Progress. Not 0: it waits for that collective, and its main thread may do what it likes.

    def of(self, row: Progress) -> Stay:
        """Return the stay as one in the collective of this row that does not complete."""
        wait = detector.WaitFor.BEGUN if row.outstanding_begun else detector.WaitFor.QUEUED
        return replace(self, wait=wait, outstanding_ns=row.outstanding_ns)


class CallChecks:
    """Which workers of this node stay in their calls while all of them are quiet. Make a new one after a sign of life."""

    def __init__(self) -> None:
        self._stays: dict[int, Stay] = {}  # by local rank
        self._first: dict[int, Stay] = {}  # the same of workers for which `stay_of` found nothing that they wait for
        self._at, self._stats = -math.inf, dict[int, process_stats.ProcessStats]()  # at the last update, by local rank
        self._next = -math.inf  # when to check again those that do not stay
        self._gap_s = FIRST_GAP_S

    def update(self, pids: Mapping[int, int], rows: Mapping[int, Progress], stacks_files: Mapping[int, str], now: float) -> None:
        """Check who has stayed, and ask the others if it is time. All arguments by local rank. now: monotonic seconds."""
        sample = process_stats.read(pids.values())
        stats = {local_rank: sample[pid] for local_rank, pid in pids.items() if pid in sample}
        self._at, self._stats = now, stats
        before = self._stays
        self._stays = {
            local_rank: stay
            for local_rank, stay in before.items()
            if local_rank in stats and continues(stay, rows[local_rank], stats[local_rank], now)
        }
        if any(local_rank in stats and _connects(before[local_rank].stats, stats[local_rank]) for local_rank in before):
            self._gap_s = FIRST_GAP_S  # a scrape, or an upload: it may well stay in the same call
            self._next = min(self._next, now + FIRST_GAP_S)
        others = {local_rank: pid for local_rank, pid in pids.items() if local_rank not in self._stays}
        if not others or now < self._next:
            return
        self._next, self._gap_s = now + self._gap_s, min(2 * self._gap_s, LONGEST_GAP_S)
        if all(local_rank in stats and can_answer(rows[local_rank], stats[local_rank]) for local_rank in others):
            self._check_calls(others, rows, stacks_files, stats, now)

    def stay(self, local_rank: int, now: float) -> tuple[detector.WaitFor, float]:
        """Return what this worker waits for and for how many seconds it has done nothing else."""
        stay = self._stays.get(local_rank)
        return (stay.wait, now - stay.since) if stay is not None else (detector.WaitFor.NOTHING, 0.0)

    def confirm(self, pids: Mapping[int, int], stacks_files: Mapping[int, str]) -> bool:
        """Return whether the stacks still show what they did when each stay began; end the stays whose stacks do not.

        A thread may have begun to compute since. Asks each worker once per stay. Arguments by local rank.
        """
        new = {local_rank: pid for local_rank, pid in pids.items() if (s := self._stays.get(local_rank)) and not s.confirmed}
        dumps = _dumps({pid: stacks_files[local_rank] for local_rank, pid in new.items()})
        for local_rank, pid in new.items():
            stay, text = self._stays.pop(local_rank), dumps.get(pid, "")
            if still_waits(stay, text):
                self._stays[local_rank] = replace(stay, confirmed=True)
        return self._stays.keys() >= pids.keys()

    def rates(self, local_rank: int) -> process_stats.Rates:
        """Return this worker's rates since it has been in its call; not known for one that does not stay."""
        stay = self._stays.get(local_rank)
        if stay is None or self._at <= stay.since:
            return process_stats.Rates()
        return process_stats.rates(stay.stats, self._stats[local_rank], self._at - stay.since)

    def left_s(self, pids: Mapping[int, int], now: float) -> float:
        """Return the seconds until `update` asks those that do not stay; 0 if all do."""
        return max(0.0, self._next - now) if pids.keys() - self._stays.keys() else 0.0

    def _check_calls(
        self,
        pids: Mapping[int, int],
        rows: Mapping[int, Progress],
        stacks_files: Mapping[int, str],
        stats: Mapping[int, process_stats.ProcessStats],
        now: float,
    ) -> None:
        asked = {local_rank: pid for local_rank, pid in pids.items() if ask(pid)}
        dumps = _dumps({pid: stacks_files[local_rank] for local_rank, pid in asked.items()})
        for local_rank, pid in asked.items():
            before = self._first.pop(local_rank, None)
            stay = stay_of(dumps.get(pid, ""), rows[local_rank], stats[local_rank], now, before)
            if stay is not None:
                (self._first if stay.wait is detector.WaitFor.NOTHING else self._stays)[local_rank] = stay


class FirstAnswers:
    """Asks each worker of a round for one answer, once it has started. Only the silence of those that have given it counts."""

    def __init__(self) -> None:
        self._asked: set[int] = set()  # by local rank
        self._next, self._gap_s = -math.inf, FIRST_GAP_S  # monotonic: when to try those again that could not be asked
        self._warned = False

    def ask(self, pids: Mapping[int, int], progress: ProgressTable, now: float) -> None:
        """Ask those that have started and can be asked now. A library may block the signal for a while. pids: by local rank."""
        if now < self._next:
            return
        rows = {local_rank: progress.read(local_rank) for local_rank in pids.keys() - self._asked}
        new = {local_rank: pids[local_rank] for local_rank, row in rows.items() if row.answers == 1 and row.sign_ns}
        if not new:
            return
        sample = process_stats.read(new.values())
        for local_rank, pid in new.items():
            if pid in sample and may_be_asked(rows[local_rank], sample[pid]) and ask(pid):
                self._asked.add(local_rank)
        if not new.keys() <= self._asked:  # reading /proc costs milliseconds, and this may last as long as the job
            self._next, self._gap_s = now + self._gap_s, min(2 * self._gap_s, LONGEST_GAP_S)
        if not self._warned and any(stats.awaits_signal is None for stats in sample.values()):
            self._warned = True
            logger.warning(
                "elastic_ext: neither /proc/PID/syscall nor wchan shows whether a worker waits for a signal, so none is asked "
                "whether it stays in a call: ranks that wait for each other with a busy core count as working for half an hour"
            )


def _dumps(paths: Mapping[int, str]) -> dict[int, str]:
    """Return the stacks of these processes. They are not kept: checks may go on for days, and the files often lie in memory."""
    dumps = dump_all(paths)
    for path in paths.values():
        empty(path)
    return dumps


def can_dump(row: Progress, stats: process_stats.ProcessStats) -> bool:
    """Return whether this worker would dump its stacks at once: one that is stopped, or asleep in the kernel, runs no handler."""
    return row.stacks_armed and stats.state not in detector.WITHOUT_HANDLERS


def can_answer(row: Progress, stats: process_stats.ProcessStats) -> bool:
    """Return whether this worker may be sent the signals, and would answer: it has done so before.

    A library can replace the handler, and then no answer means nothing.
    """
    return row.answers > 1 and row.stacks_armed and may_be_asked(row, stats)


def may_be_asked(row: Progress, stats: process_stats.ProcessStats) -> bool:
    """Return whether this worker has had the handler, and is in a state to answer."""
    if not row.answers or row.phase == "exit" or stats.debugged or stats.awaits_signal is not False:
        return False
    return stats.state not in detector.WITHOUT_HANDLERS and not stats.asleep_in_kernel


def stay_of(text: str, row: Progress, stats: process_stats.ProcessStats, now: float, before: Stay | None) -> Stay | None:
    """Return the stay that a worker's stacks show; None if it may do its own part.

    It waits for nothing that is known while only its other threads are seen to wait: a worker asks its recorder late. Once that
    knows of a collective, the stay began when they were first seen to.

    text: the stacks. stats: of its family. now: monotonic seconds. before: what the last check found, if that was a wait for
    nothing that is known.
    """
    wait = detector.wait_of(text)
    if wait is not detector.WaitFor.NOTHING:
        return Stay(now, wait, row.answers, detector.others_idle(text), stats)
    if not text or not detector.others_wait(text):
        return None
    stay = Stay(now, detector.WaitFor.NOTHING, 0, True, stats)
    if not is_outstanding(row, now):
        return stay
    if before and row.outstanding_ns <= before.since * 1e9 and continues(before.of(row), row, stats, now):
        return before.of(row)
    return stay.of(row)


def is_outstanding(row: Progress, now: float) -> bool:
    """Return whether a collective of this worker does not complete. Not if the recorder was last read too long ago to know."""
    return row.outstanding_ns != 0 and now - row.outstanding_at_ns / 1e9 <= RECORDED_S


def continues(stay: Stay, row: Progress, stats: process_stats.ProcessStats, now: float) -> bool:
    """Return whether the worker still waits for the same, and nothing else of its family has done anything meanwhile."""
    if stats.debugged or stats.asleep_in_kernel or stats.state == detector.STOPPED or _connects(stay.stats, stats):
        return False
    if stay.outstanding_ns:
        if not is_outstanding(row, now) or stay.of(row) != stay:
            return False
    elif row.answers != stay.answers:
        return False
    if now - stay.since < RATES_S:
        return True
    rates = process_stats.rates(stay.stats, stats, now - stay.since)
    if stay.outstanding_ns:  # it may spin; but bytes may be those of the collective
        return not detector.works(0.0, rates.bytes_s)
    threads_share = 0.0 if stay.others_idle else rates.threads_share
    return not detector.works(rates.children_share, rates.bytes_s) and not detector.works(threads_share, rates.bytes_s)


def still_waits(stay: Stay, text: str) -> bool:
    """Return whether the stacks show what they did when the stay began."""
    if stay.outstanding_ns:
        return bool(text) and detector.others_wait(text)
    return detector.wait_of(text) is stay.wait and (detector.others_idle(text) or not stay.others_idle)


def _connects(before: process_stats.ProcessStats, now: process_stats.ProcessStats) -> bool:
    """Return whether the worker has opened TCP connections.

    NCCL connects the ranks of a group within its first collective: one long call, at all ranks at once, that still gets on.
    Closed connections do not count, nor do those of other processes of the family (loggers, loaders); their bytes do.
    """
    return before.own_sockets is not None and now.own_sockets is not None and not now.own_sockets <= before.own_sockets
