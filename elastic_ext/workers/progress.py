"""The agent's side of the progress table: one row of shared memory per worker; see `progress_layout` for the layout.

Reading costs the training nothing: it takes no message and no lock. A worker writes one byte to the wake pipe
(`worker_env.wake`) when it has changed a part of the table that the agent waits for.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, fields
from operator import itemgetter

from elastic_ext.workers import progress_layout as layout

logger = logging.getLogger(__name__)

_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_logged: set[str] = set()  # reasons why named pipes cannot be made


def named_pipe(path: str) -> tuple[str, int, int | None]:
    """Make a pipe for other processes of this user. Return its name, a non-blocking reader, and a writer or None. Raises OSError.

    The name is `path`, or the reader's in /proc if named pipes are refused (a seccomp profile, a file system). Such an unnamed
    pipe reads as ended while it has no writer, even before the first one opens it. The returned writer prevents that.
    """
    try:
        os.mkfifo(path, 0o600)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        if str(error.strerror) not in _logged:
            _logged.add(str(error.strerror))
            logger.info("cannot create named pipes (%s); using unnamed pipes instead", error)
    else:
        return path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), None
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return f"/proc/{os.getpid()}/fd/{reader}", reader, writer


class WakePipe:
    """A pipe that is readable after a worker calls `worker_env.wake`. The progress table says why: a lost byte does no harm."""

    def __init__(self, path: str) -> None:
        """Create the pipe at `path`. Workers open the attribute `path`, which may differ. Raises OSError."""
        self.path, self._descriptor, writer = named_pipe(path)
        # A pipe that no other process holds open would always be readable.
        self._writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC) if writer is None else writer

    def fileno(self) -> int:
        return self._descriptor

    def clear(self) -> None:
        """Forget the wake-ups so far. Read the progress table after this call, not before."""
        with suppress(BlockingIOError):
            while os.read(self._descriptor, 4096):
                pass

    def close(self) -> None:
        """Close both ends. The pipe's name is removed with its directory."""
        os.close(self._descriptor)
        os.close(self._writer)


def _count(at: int) -> int:
    return field(default=0, metadata={"decode": itemgetter(at)})


def _flag(at: int) -> bool:
    return field(default=False, metadata={"decode": lambda row: bool(row[at])})


def _seconds(at: int) -> float:
    return field(default=0.0, metadata={"decode": lambda row: row[at] / 1e9})


def _less_one(at: int) -> int | None:
    return field(default=None, metadata={"decode": lambda row: row[at] - 1 if row[at] else None})


def _phase(row: memoryview) -> int:
    return min(row[layout.PHASE], len(layout.PHASES) - 1)  # the script can write anything here


def _gaps(row: memoryview) -> tuple[int, ...]:
    first = layout.GAPS + _phase(row) * layout.GAP_BUCKETS
    return tuple(row[first : first + layout.GAP_BUCKETS])


def _account(row: memoryview) -> str:
    doing = min(row[layout.DOING], len(layout.ACCOUNTS))  # the script can write anything here
    return layout.ACCOUNTS[layout.account(doing, _phase(row), row[layout.STEPS], row[layout.REPEATED])]


def _gauges(row: memoryview) -> tuple[tuple[str, float], ...]:
    found = {}
    for at in range(layout.GAUGES, layout.AGENT_FIELDS, layout.GAUGE_FIELDS):
        if 0 < row[at] <= layout.GAUGE_NAME_BYTES:
            name = row[at + 2 : at + layout.GAUGE_FIELDS].tobytes()[: row[at]].decode("latin-1")
            if layout.is_gauge_name(name):  # the script can write anything here
                found[name] = row[at + 1 : at + 2].cast("B").cast("d")[0]
    return tuple(found.items())


@dataclass(frozen=True)
class Progress:
    """One worker's row, decoded: each field names its place in the row, where `progress_layout` says more.

    A time ends in `_ns` and is that of time.monotonic_ns(); 0: it has not come yet. A step or number that may be None is unknown.
    """

    pid: int = _count(layout.PID)  # 0: no bootstrap is in place, so nothing is known about this worker
    steps: int = _count(layout.STEPS)  # since the worker started
    first_step_ns: int = _count(layout.FIRST_STEP_NS)
    last_step_ns: int = _count(layout.LAST_STEP_NS)
    stacks_armed: bool = _flag(layout.STACKS_ARMED)  # without a handler, the signal that dumps stacks would kill the worker
    asks_for_saves: bool = _flag(layout.ASKS_FOR_SAVES)
    saves: int = _count(layout.SAVES)
    saved_step: int | None = _less_one(layout.SAVED_STEP)
    saved_after: int = _count(layout.SAVED_AFTER)  # `steps` when the last committed save began
    save_s: float | None = field(
        default=None, metadata={"decode": lambda row: row[layout.SAVE_NS] / 1e9 if row[layout.SAVE_NS] else None}
    )
    saved_ns: int = _count(layout.SAVED_AT_NS)
    saving_s: float = _seconds(layout.SAVES_NS)  # of all committed saves
    save_kept: int = _count(layout.SAVE_KEPT)
    save_failed: int = _count(layout.SAVE_FAILED)
    failed_saves: int = _count(layout.FAILED_SAVES)
    ends_with: int = _count(layout.ENDS_WITH)
    exit_handlers_done: bool = _flag(layout.EXIT_HANDLERS_DONE)
    phase: str = field(default="", metadata={"decode": lambda row: layout.PHASES[_phase(row)]})  # "": the script does not say
    reports: int = _count(layout.PROGRESS)
    sign_ns: int = _count(layout.SIGN_NS)  # the last sign of life: a step, a report, a change of phase
    gaps: tuple[int, ...] = field(default=(), metadata={"decode": _gaps})  # histogram of this phase, see progress_layout.GAPS
    has_torch: bool = _flag(layout.OPTIM_HOOKED)
    answers: int = _count(layout.ANSWERS)  # changes with each answer; 0: it answers no ANSWER_SIGNAL, which would kill it
    total_steps: int | None = field(default=None, metadata={"decode": lambda row: row[layout.TOTAL_STEPS] or None})
    steps_before: int | None = _less_one(layout.STEPS_BEFORE)
    ended_ns: int = _count(layout.ENDED_AT_NS)
    loads: int = _count(layout.LOADS)
    loading_s: float = _seconds(layout.LOADS_NS)  # with the checks
    checks: int = _count(layout.CHECKS)
    checking_s: float = _seconds(layout.CHECKS_NS)
    began_ns: int = _count(layout.BEGAN_NS)
    spent_ns: tuple[int, ...] = field(  # settled, by the index in progress_layout.ACCOUNTS
        default=(), metadata={"decode": lambda row: tuple(row[layout.SPENT : layout.SPENT + len(layout.ACCOUNTS)])}
    )
    account: str = field(default="", metadata={"decode": _account})  # of what the training thread has done since then
    tokens: int = _count(layout.TOKENS)
    flops: float = field(default=0.0, metadata={"decode": lambda row: row[layout.MEGAFLOPS] * 1e6})
    copies: int = _count(layout.COPIES)
    copies_stall_s: float = _seconds(layout.COPIES_STALL_NS)
    copied_step: int | None = _less_one(layout.COPIED_STEP)
    copy_every: int = _count(layout.COPY_EVERY)  # steps from one copy to the next; 0: unknown
    failed_copies: int = _count(layout.FAILED_COPIES)
    unusable_copies: int = _count(layout.UNUSABLE_COPIES)
    parts_sent: int = _count(layout.PARTS_SENT)
    parts_not_sent: int = _count(layout.PARTS_NOT_SENT)
    sent_bytes: int = _count(layout.SENT_BYTES)
    outstanding_ns: int = _count(layout.OUTSTANDING_NS)  # 0: no collective is outstanding
    outstanding_at_ns: int = _count(layout.OUTSTANDING_AT_NS)
    outstanding_begun: bool = _flag(layout.OUTSTANDING_BEGUN)
    samples: int = _count(layout.SAMPLES)
    jit_saves: bool = _flag(layout.JIT_SAVES)  # its handler of SIGTERM is transformers' own, for a just-in-time save
    resumes: bool = _flag(layout.RESUMES)  # the script takes the agent's word for what to resume from
    record_broken: bool = _flag(layout.RECORD_BROKEN)  # what its journal of saves says may not be believed

    gauges: tuple[tuple[str, float], ...] = field(default=(), metadata={"decode": _gauges})  # names and values, as reported

    @property
    def stepping_s(self) -> float:
        """Return the seconds from its first step to its last."""
        return max(0, self.last_step_ns - self.first_step_ns) / 1e9

    @property
    def step_s(self) -> float | None:
        """Return the mean seconds of a step; None if not known."""
        return self.stepping_s / (self.steps - 1) if self.steps > 1 else None

    @property
    def first_step_done(self) -> bool | None:
        """Return whether the first step is done; None if not known."""
        return self.steps > 0 if self.pid else None


_DECODERS = [each.metadata["decode"] for each in fields(Progress)]


class ProgressTable:
    """The file, which no process of this agent maps: a worker may truncate it, and then to touch a mapping would end the agent.

    What a truncated file lacks reads as 0: nothing is known about these workers.
    """

    def __init__(self, path: str, workers: int, folder: str | None = None) -> None:
        """Create the file `path`, best on tmpfs. Workers put others beside it, so no other user may write there.

        workers: number of rows. folder: that is removed with it. Raises OSError if there is no room for it.
        """
        self.path, self._workers, self._folder = path, workers, folder
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._file)
        try:
            # Not ftruncate: a hole that a full tmpfs cannot fill raises SIGBUS when a worker touches it.
            os.posix_fallocate(self._file, 0, workers * layout.ROW_BYTES)
        except OSError:
            os.unlink(path)
            raise

    def read(self, slot: int) -> Progress:
        """Decode the row of the worker with this local rank."""
        return self._read(slot, 1)[0]

    def read_all(self) -> list[Progress]:
        """Decode the rows of all workers of this node, by slot."""
        return self._read(0, self._workers)

    def _read(self, slot: int, count: int) -> list[Progress]:
        size = layout.ROW_BYTES
        try:
            data = os.pread(self._file, count * size, slot * size)
        except OSError as error:  # of a disk
            logger.warning("cannot read the progress table %s: %s", self.path, error)
            data = b""
        data = data.ljust(count * size, b"\0")
        rows = (memoryview(data)[at : at + size].cast("Q") for at in range(0, len(data), size))
        return [Progress(*[decode(row) for decode in _DECODERS]) for row in rows]

    def want_save(self, slot: int, number: int) -> None:
        """Ask this worker to look for the agreed step boundary of save on demand `number`."""
        self._write(slot, layout.SAVE_WANTED, number)

    def repeat(self, steps: int) -> None:
        """Show all workers how many of their first steps were done before, for `progress_layout.settle`. Before they start."""
        for slot in range(self._workers):
            self._write(slot, layout.REPEATED, steps)

    def _write(self, slot: int, field: int, value: int) -> None:
        try:
            os.pwrite(self._file, value.to_bytes(8, sys.byteorder), slot * layout.ROW_BYTES + field * 8)
        except OSError as error:  # a worker has truncated the file, and the room is gone
            logger.warning("cannot write to the progress table %s: %s", self.path, error)

    def remove(self) -> None:
        """Unlink the file. What is in it stays until the last reader drops this object."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class EndingWorkers:
    """The workers of a round that are about to end with an error. They report it themselves and get no signal to end.

    After an error, a worker runs its exit handlers. They may take as long as the grace period allows. The agent does not wait
    for the interpreter's teardown that follows (0.4 s with torch, more with a device).
    """

    def __init__(self, table: ProgressTable | None, wake_pipe: WakePipe) -> None:
        """table: that of the round; None if there is none: then nothing is known."""
        self._table, self._wake_pipe = table, wake_pipe

    def fileno(self) -> int:
        """Return a descriptor that is readable when a worker has reported something."""
        return self._wake_pipe.fileno()

    def clear(self) -> None:
        """Forget the reports so far. Call `exit_codes` or `past_exit_handlers` after this, not before."""
        self._wake_pipe.clear()

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the workers that end with an error, by local rank, including those that have ended since."""
        return {slot: row.ends_with for slot, row in enumerate(self._read()) if row.ends_with}

    def past_exit_handlers(self) -> dict[int, int]:
        """Return the same for the workers whose exit handlers are done."""
        return {slot: row.ends_with for slot, row in enumerate(self._read()) if row.ends_with and row.exit_handlers_done}

    def _read(self) -> list[Progress]:
        return self._table.read_all() if self._table is not None else []
