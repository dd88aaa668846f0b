"""This process as a worker of the agent: its row of the progress table, and the address of the round's store.

`workers.worker_env` defines the message with which the agent describes the worker; `workers.progress_layout` defines the table
in shared memory.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from dataclasses import dataclass

from elastic_ext.workers import progress_layout, worker_env

logger = logging.getLogger(__name__)

_WORKING = tuple(map(progress_layout.PHASES.index, ("step", "eval")))


class ProgressRow:
    """This worker's row of the progress table. Each value is one 64-bit word, written with a single store."""

    def __init__(self, path: str, slot: int, wake_path: str) -> None:
        """path: the progress table. wake_path: the pipe that wakes the agent. Raises OSError, ValueError: there is no row."""
        first = slot * progress_layout.ROW_BYTES
        with open(path, "r+b") as file:
            table = mmap.mmap(file.fileno(), first + progress_layout.ROW_BYTES)
        self._words = memoryview(table)[first:].cast("Q")
        self._wake_path = wake_path

    def report_progress(self) -> None:
        """Count a sign of progress other than an optimizer step."""
        now_ns = time.monotonic_ns()
        progress_layout.settle(self._words, now_ns)
        self._words[progress_layout.PROGRESS] += 1
        progress_layout.note_sign(self._words, now_ns)

    def report_total_steps(self, total: int, done: int | None) -> None:
        """Report the steps of the whole job, and how many of them are done now; None: the agent knows."""
        self._words[progress_layout.TOTAL_STEPS] = total
        if done is not None:
            self._words[progress_layout.STEPS_BEFORE] = max(0, done - self._words[progress_layout.STEPS]) + 1

    @property
    def phase(self) -> int:
        """The current phase, an index into `progress_layout.PHASES`."""
        return self._words[progress_layout.PHASE]

    def enter_phase(self, phase: int, failed: bool = False) -> None:
        """End the current phase, which is a sign of progress, and begin another. failed: an exception ends it."""
        now_ns = time.monotonic_ns()
        progress_layout.note_sign(self._words, now_ns)  # this sign belongs to the phase that ends
        if not (failed and self.phase in _WORKING):  # else it may have waited for a lost peer: see progress_layout.end
            progress_layout.settle(self._words, now_ns)
        self._words[progress_layout.PHASE_SINCE_NS] = now_ns
        self._words[progress_layout.PHASE] = phase

    @property
    def doing(self) -> int:
        """What the training thread was told to do, as the field DOING has it."""
        return self._words[progress_layout.DOING]

    def begin_doing(self, doing: int) -> None:
        """Settle the time so far; count it as `doing` from now on, in any phase. Only for the training thread.

        In the exit handlers of a script that has failed this does nothing: see `progress_layout.end`.
        """
        if not self._words[progress_layout.ENDS_WITH]:
            progress_layout.settle(self._words, time.monotonic_ns())
            self._words[progress_layout.DOING] = doing

    def add_tokens(self, count: int) -> None:
        self._words[progress_layout.TOKENS] += count

    def add_megaflops(self, count: int) -> None:
        self._words[progress_layout.MEGAFLOPS] += count

    def requested_save(self) -> int:
        """Record that this script asks for saves on demand; return the number of the newest request, 0 for none."""
        self._words[progress_layout.ASKS_FOR_SAVES] = 1
        return self._words[progress_layout.SAVE_WANTED]

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self._words[progress_layout.STEPS]

    def report_saved(self, step: int, seconds: float, answered: int | None, after: int) -> None:
        """Report a complete checkpoint of `step`, which took `seconds`.

        answered: the request that it answers, if any. after: how many optimizer steps of this worker are in it.
        """
        words = self._words
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
        self._words[progress_layout.LOADS_NS] += int(seconds * 1e9)
        self._words[progress_layout.LOADS] += 1

    def report_checked(self, seconds: float) -> None:
        self._words[progress_layout.CHECKS_NS] += int(seconds * 1e9)
        self._words[progress_layout.CHECKS] += 1

    def report_copied(self, step: int, stall_s: float, every: int) -> None:
        """Report a committed copy of the state in memory. every: steps until the next one."""
        words = self._words
        words[progress_layout.COPIED_STEP] = step + 1
        words[progress_layout.COPY_EVERY] = every
        words[progress_layout.COPIES_STALL_NS] += int(stall_s * 1e9)
        words[progress_layout.COPIES] += 1

    def report_part_sent(self, size: int | None) -> None:
        """Report that another node has a part of a copy. size: in bytes; None: it does not have it."""
        self._words[progress_layout.PARTS_NOT_SENT if size is None else progress_layout.PARTS_SENT] += 1
        self._words[progress_layout.SENT_BYTES] += size or 0

    def report_copy_failed(self) -> None:
        self._words[progress_layout.FAILED_COPIES] += 1

    def report_copy_unusable(self) -> None:
        self._words[progress_layout.UNUSABLE_COPIES] += 1

    def report_save_failed(self, request: int) -> None:
        """Report that a save failed. request: the last request that this worker acted on."""
        self._words[progress_layout.SAVE_FAILED] = request
        self._words[progress_layout.FAILED_SAVES] += 1
        worker_env.wake(self._wake_path)


@dataclass(frozen=True, eq=False)
class Worker:
    """One worker. store: host and port of the round's store."""

    row: ProgressRow
    store: tuple[str, int]
    rank: int
    world_size: int


_workers: dict[int, Worker | None] = {}  # by pid: a child forked by the script is not the agent's worker


def this_worker() -> Worker | None:
    """Return this process as a worker; None if our agent did not start it."""
    pid = os.getpid()
    if pid not in _workers:
        _workers[pid] = None if _workers else _from_environment()
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
