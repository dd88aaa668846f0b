"""This process as a worker of the agent: its row of the progress table, the address of the round's store, and what a script
reports besides its optimizer steps: progress, phases, amounts of work and gauges.

`workers.worker_env` defines the message with which the agent describes the worker; `workers.progress_layout` defines the table
in shared memory.
"""

from __future__ import annotations

import logging
import mmap
import numbers
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from elastic_ext.base.errors import UsageError
from elastic_ext.workers import progress_layout, worker_env

MEMORY_THREAD = worker_env.MEMORY_THREAD  # for the checkpoints

logger = logging.getLogger(__name__)

_WORKING = tuple(map(progress_layout.PHASES.index, ("step", "eval")))


class ProgressRow:
    """This worker's row of the progress table. Each value is one 64-bit word, written with a single store.

    Where our agent did not start this process, it is plain memory that no agent reads: the same code runs.
    """

    def __init__(self, path: str | None = None, slot: int = 0, wake_path: str | None = None) -> None:
        """path: the progress table. wake_path: the pipe that wakes the agent. Raises OSError, ValueError: there is no row."""
        first, table = slot * progress_layout.ROW_BYTES, memoryview(bytearray(progress_layout.ROW_BYTES))
        if path is not None:
            with open(path, "r+b") as file:
                table = memoryview(mmap.mmap(file.fileno(), first + progress_layout.ROW_BYTES))[first:]
        self.words = table.cast("Q")
        self._floats = table.cast("d")
        self._gauges: dict[str, int] = {}  # the place of each value, by name
        self._adding = threading.RLock()  # re-entrant: a signal's handler may report, too
        self._free = list(range(progress_layout.GAUGES, progress_layout.AGENT_FIELDS, progress_layout.GAUGE_FIELDS))
        self._wake_path = wake_path

    def enter_phase(self, phase: int, failed: bool = False) -> None:
        """End the current phase, which is a sign of progress, and begin another. failed: an exception ends it."""
        now_ns = time.monotonic_ns()
        progress_layout.note_sign(self.words, now_ns)  # this sign belongs to the phase that ends
        # What failed may have waited for a lost peer: see progress_layout.end.
        if not (failed and self.words[progress_layout.PHASE] in _WORKING):
            progress_layout.settle(self.words, now_ns)
        self.words[progress_layout.PHASE_SINCE_NS] = now_ns
        self.words[progress_layout.PHASE] = phase

    def begin_doing(self, doing: int) -> None:
        """Settle the time so far; count it as `doing` from now on, in any phase. Only for the training thread.

        In the exit handlers of a script that has failed this does nothing: see `progress_layout.end`.
        """
        if not self.words[progress_layout.ENDS_WITH]:
            progress_layout.settle(self.words, time.monotonic_ns())
            self.words[progress_layout.DOING] = doing

    def show(self, name: str, value: float) -> None:
        """Set a gauge. Raises UsageError if there are too many."""
        if name not in self._gauges:
            with self._adding:
                self._add(name, value)
        self._floats[self._gauges[name]] = value

    def _add(self, name: str, value: float) -> None:
        if name in self._gauges:  # another thread was first
            return
        if not self._free:
            raise UsageError(
                f"report({name}=...): it comes after {progress_layout.MOST_GAUGES} other names ({', '.join(self._gauges)}): "
                "report fewer; a name should not hold a step or an id"
            )
        at = self._free.pop(0)
        self._gauges[name] = at + 1
        self._floats[at + 1] = value
        padded = name.encode().ljust(progress_layout.GAUGE_NAME_BYTES, b"\0")
        self.words[at + 2 : at + progress_layout.GAUGE_FIELDS] = memoryview(padded).cast("Q")
        self.words[at] = len(name)

    def report_saved(self, step: int, seconds: float, answered: int | None, after: int) -> None:
        """Report a complete checkpoint of `step`, which took `seconds`.

        answered: the request that it answers, if any. after: how many optimizer steps of this worker are in it.
        """
        words = self.words
        words[progress_layout.SAVED_AFTER] = after
        words[progress_layout.SAVED_STEP] = step + 1
        words[progress_layout.SAVE_NS] = took_ns = max(1, int(seconds * 1e9))
        words[progress_layout.SAVES_NS] += took_ns
        words[progress_layout.SAVED_AT_NS] = time.monotonic_ns()
        words[progress_layout.SAVES] += 1
        if answered is not None:
            words[progress_layout.SAVE_KEPT] = answered
        worker_env.wake(self._wake_path)

    def report_loaded(self, seconds: float) -> None:
        """Report that a checkpoint is in place. seconds: from the request, with the check of its files."""
        self.words[progress_layout.LOADS_NS] += int(seconds * 1e9)
        self.words[progress_layout.LOADS] += 1

    @contextmanager
    def timed_check(self) -> Iterator[None]:
        """Report the time that this block takes as that of a check for damage, with any result."""
        began = time.monotonic_ns()
        try:
            yield
        finally:
            self.words[progress_layout.CHECKS_NS] += time.monotonic_ns() - began
            self.words[progress_layout.CHECKS] += 1

    def report_copied(self, step: int, stall_s: float, every: int) -> None:
        """Report a committed copy of the state in memory.

        stall_s: for how long it has stalled training. every: steps until the next one.
        """
        words = self.words
        words[progress_layout.COPIED_STEP] = step + 1
        words[progress_layout.COPY_EVERY] = every
        words[progress_layout.COPIES_STALL_NS] += int(stall_s * 1e9)
        words[progress_layout.COPIES] += 1

    def report_part_sent(self, size: int | None) -> None:
        """Report that another node has this rank's part of a copy, too. size: in bytes; None: it does not have it."""
        self.words[progress_layout.PARTS_NOT_SENT if size is None else progress_layout.PARTS_SENT] += 1
        self.words[progress_layout.SENT_BYTES] += size or 0

    def report_copy_failed(self) -> None:
        self.words[progress_layout.FAILED_COPIES] += 1

    def report_copy_unusable(self) -> None:
        self.words[progress_layout.UNUSABLE_COPIES] += 1

    def report_save_failed(self, request: int) -> None:
        """Report that a save failed. request: the last request that this worker acted on."""
        self.words[progress_layout.SAVE_FAILED] = request
        self.words[progress_layout.FAILED_SAVES] += 1
        worker_env.wake(self._wake_path)


@dataclass(frozen=True, eq=False)
class Worker:
    """One worker. store: host and port of the round's store."""

    row: ProgressRow
    store: tuple[str, int] = ("", 0)
    rank: int = 0
    world_size: int = 1


_workers: dict[int, Worker] = {}  # by pid: a child forked by the script is not the agent's worker


def this_worker() -> Worker:
    """Return this process as a worker; one whose row no agent reads if ours did not start it."""
    pid = os.getpid()
    if pid not in _workers:
        _workers[pid] = (None if _workers else _from_environment()) or Worker(ProgressRow())
    return _workers[pid]


def _from_environment() -> Worker | None:
    text = os.environ.get(worker_env.WORKER_ENV)
    if not text:
        return None
    try:
        message = worker_env.loads(text)
        version = message.get("progress_version", progress_layout.VERSION)
        if version != progress_layout.VERSION:
            raise ValueError(f"expected version {progress_layout.VERSION} of the progress table, got version {version!r}")
        row = ProgressRow(message["progress"], message["slot"], message["wake_pipe"])
        host, port = message["store"]
        return Worker(row, (host, port), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except (KeyError, TypeError, ValueError, OSError) as error:
        logger.warning("no saves on demand in this worker: %s %s", type(error).__name__, error)
        return None


# What a script reports.

_PHASES = tuple(name for name in progress_layout.PHASES if name != "exit")


def report_progress() -> None:
    """Report progress other than a step of a torch.optim.Optimizer, e.g. an evaluation batch."""
    words, now_ns = this_worker().row.words, time.monotonic_ns()
    progress_layout.settle(words, now_ns)
    words[progress_layout.PROGRESS] += 1
    progress_layout.note_sign(words, now_ns)


def report_total_steps(total: int, done: int | None = None) -> None:
    """Report how many optimizer steps the whole job will make; the agent works out from it how far the job is.

    total: from the beginning of the job to its end, not from the last restart. done: how many of them are done now; default: as
    many as the checkpoint has that the agent chose. Raises UsageError unless they are whole numbers, of 1 and of 0 or more.
    """
    if not _is_whole(total, 1) or not (done is None or _is_whole(done, 0)):
        raise UsageError(f"report_total_steps({total!r}, {done!r}): expected whole numbers, of 1 or more and of 0 or more")
    words = this_worker().row.words
    words[progress_layout.TOTAL_STEPS] = total
    if done is not None:
        words[progress_layout.STEPS_BEFORE] = max(0, done - words[progress_layout.STEPS]) + 1


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and least <= value < 1 << 62


def phase(name: str) -> Phase:
    """Begin a phase of this process.

    The phase lasts until the next call, or, as `with elastic_ext.phase("eval"):`, until the block ends. Call this in the training
    thread; other threads have no phase. The hang detector is more patient with "compile", "checkpoint" and "eval".

    name: "compile", "data", "step", "checkpoint" or "eval"; "" for none of them. Raises UsageError for any other.
    """
    if name not in _PHASES:
        raise UsageError(f"phase({name!r}): expected one of {', '.join(filter(None, _PHASES))}")
    row = this_worker().row
    before = row.words[progress_layout.PHASE]
    row.enter_phase(progress_layout.PHASES.index(name))
    return Phase(before)


class Phase:
    """A phase that has begun; the end of a `with` block restores the previous one."""

    def __init__(self, before: int) -> None:
        self._before = before

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        this_worker().row.enter_phase(self._before, failed=kind is not None)


def report(**gauges: float) -> None:
    """Show numbers of this worker, such as its loss, at the agent's /metrics: `report(loss=2.5, learning_rate=1e-4)`.

    Each is a gauge with the labels local_rank and rank. It shows what was reported last, and ends with its worker. A worker may
    have progress_layout.MOST_GAUGES names. What a child of the worker reports is not shown.

    Raises UsageError: a name that Prometheus does not allow or that begins as the agent's own do, too many names, or what is no
    number of Python or NumPy.
    """
    for name, value in gauges.items():
        if not progress_layout.is_gauge_name(name):
            raise UsageError(
                f"report(): {name!r}: expected a name of letters, digits and underscores, {progress_layout.GAUGE_NAME_BYTES} at "
                f"most, with no digit first, and neither {' nor '.join(progress_layout.OWN_PREFIXES)} in front"
            )
        if not isinstance(value, numbers.Real):  # float() of a tensor would wait for its device
            raise UsageError(f"report({name}=...): expected a number, got {type(value).__name__}; of a tensor, report .item()")
    row = this_worker().row
    for name, value in gauges.items():
        row.show(name, float(value))


MOST_FLOPS = 1e21  # of one call: days of a GPU. The agent's word for the sum holds 1.8e25
_flops_left = 0.0  # reported, but less than a million


def report_tokens(count: int) -> None:
    """Count tokens that this process has trained on. Raises UsageError for less than 0 and for what is no whole number."""
    if not isinstance(count, int) or count < 0:
        raise UsageError(f"report_tokens({count!r}): expected a whole number of 0 or more")
    this_worker().row.words[progress_layout.TOKENS] += count


def report_flops(count: float) -> None:
    """Count floating-point operations that this process has done. Raises UsageError for less than 0 and more than MOST_FLOPS."""
    global _flops_left
    if not 0 <= count <= MOST_FLOPS:
        raise UsageError(f"report_flops({count!r}): expected a number from 0 to {MOST_FLOPS:g}")
    whole, _flops_left = divmod(count + _flops_left, 1e6)
    this_worker().row.words[progress_layout.MEGAFLOPS] += int(whole)


@contextmanager
def doing(account: str) -> Iterator[None]:
    """Count the training thread's time in this block in `account`, one of progress_layout.ACCOUNTS, in any phase."""
    row = this_worker().row
    before = row.words[progress_layout.DOING]
    row.begin_doing(progress_layout.ACCOUNTS.index(account) + 1)
    try:
        yield
    finally:
        row.begin_doing(before)
