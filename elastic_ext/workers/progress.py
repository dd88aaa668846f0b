"""The agent's side of the progress table: one row of shared memory per worker; see `progress_layout` for the layout.

Reading costs the training nothing: it takes no message and no lock. A worker writes one byte to the wake pipe
(`worker_env.wake`) when it has changed a part of the table that the agent waits for.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_ext.workers import progress_layout as layout

logger = logging.getLogger(__name__)


_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_logged: set[str] = set()  # reasons why named pipes cannot be made


def named_pipe(path: str) -> tuple[str, int, int | None]:
    """Make a pipe that other processes of this user can open by name.

    Returns:
        The name, a non-blocking descriptor to read from, and the descriptor of a writer or None. The name is `path`, or the
        reader's name in /proc if named pipes are refused (a seccomp profile, a file system). Such an unnamed pipe reads as ended
        while it has no writer, even before the first one opens it. The returned writer prevents that.

    Raises:
        OSError: no pipe can be made.
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
        # A pipe that nobody else holds open would always be readable.
        self._writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC) if writer is None else writer

    def fileno(self) -> int:
        return self._descriptor

    def clear(self) -> None:
        """Forget the wake-ups so far. Read the progress table after this call, not before."""
        try:
            while os.read(self._descriptor, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close both ends. The pipe's name is removed with its directory."""
        os.close(self._descriptor)
        os.close(self._writer)


@dataclass(frozen=True)
class Progress:
    """One worker's row, decoded.

    Attributes:
        pid: pid of the worker whose bootstrap is in place; 0: no bootstrap, so nothing is known about this worker.
        steps: optimizer steps done since the worker started.
        first_step_ns, last_step_ns: time.monotonic_ns() of these steps; 0 before the first.
        has_torch: it has imported torch.
        answers: changes whenever its main thread has answered ANSWER_SIGNAL; 0: it answers none, and the signal would kill it.
        stacks_armed: the signal that dumps the worker's stacks has a handler. Without one, the signal would kill the worker.
        asks_for_saves: the script asks at its step boundaries whether to save (see `elastic_ext.training.saves`).
        saves: checkpoints that the worker has seen committed.
        saved_step, save_s: step and duration in seconds of the last one. saved_after: its `steps` when that save began.
        saved_ns: time.monotonic_ns() of its commit; 0: none yet.
        saving_s: duration of all of them, in seconds.
        save_kept, save_failed: numbers of the last save on demand that was committed, and of the last that failed.
        failed_saves: number of saves that failed.
        loads, loading_s: number of checkpoints that the worker has loaded, and the seconds that this took, with the checks.
        checks, checking_s: number of checkpoints whose files it has checked for damage, with the others, and the seconds.
        ends_with: exit code of a worker whose script has ended with an error, or 0.
        ended_ns: time.monotonic_ns() of the exception that ended the script; 0: none has.
        exit_handlers_done: the part of the worker's end that the script can notice is over.
        phase: what the script says it is doing, one of progress_layout.PHASES; "": it does not say.
        reports: progress reports, besides the steps.
        sign_ns: time.monotonic_ns() of the last sign of life (a step, a report, a change of phase); 0: none yet.
        total_steps, steps_before: of the whole job, and of the job before this worker's first, if the script told; else None.
        posts_status: the script posts the status of its Kubeflow TrainJob itself.
        began_ns: when its bootstrap took over, time.monotonic_ns(); 0: it has not yet.
        spent_ns: settled time of its training thread, by the index of its account in progress_layout.ACCOUNTS.
        account: what the thread does since then, one of progress_layout.ACCOUNTS.
        tokens, flops: as the script reported them.
        copies, copies_stall_s: number of copies of its state in memory, and the seconds for which they have stalled training.
        copied_step: step of the last one. copy_every: steps from one to the next; 0: unknown. failed_copies: those that failed.
        unusable_copies: number of copies that it could not load.
        outstanding_ns: since when it has had an outstanding collective and none has completed; 0: it has none.
        outstanding_at_ns: when that was last read.
        gaps: a histogram of gaps between signs of life in this phase: entry i counts those in [2 ** i / 2, 2 ** i) ms.
    """

    pid: int
    steps: int
    first_step_ns: int
    last_step_ns: int
    stacks_armed: bool
    asks_for_saves: bool = False
    saves: int = 0
    saved_step: int | None = None
    saved_after: int = 0
    save_s: float | None = None
    saved_ns: int = 0
    saving_s: float = 0.0
    save_kept: int = 0
    save_failed: int = 0
    failed_saves: int = 0
    ends_with: int = 0
    exit_handlers_done: bool = False
    phase: str = ""
    reports: int = 0
    sign_ns: int = 0
    gaps: tuple[int, ...] = ()
    has_torch: bool = False
    answers: int = 0
    total_steps: int | None = None
    steps_before: int | None = None
    posts_status: bool = False
    ended_ns: int = 0
    loads: int = 0
    loading_s: float = 0.0
    checks: int = 0
    checking_s: float = 0.0
    began_ns: int = 0
    spent_ns: tuple[int, ...] = ()
    account: str = ""
    tokens: int = 0
    flops: float = 0.0
    copies: int = 0
    copies_stall_s: float = 0.0
    copied_step: int | None = None
    copy_every: int = 0
    failed_copies: int = 0
    unusable_copies: int = 0
    outstanding_ns: int = 0
    outstanding_at_ns: int = 0

    @property
    def first_step_done(self) -> bool | None:
        """Return whether the first step is done; None if not known."""
        return self.steps > 0 if self.pid else None


class ProgressTable:
    """The progress table of one round."""

    def __init__(self, path: str, workers: int) -> None:
        """Create the file `path`, best on tmpfs. workers: number of rows. Raises OSError if there is no room for it."""
        self.path = path
        size = workers * layout.ROW_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Not ftruncate: a hole that a full tmpfs cannot fill raises SIGBUS when it is touched, here or in the worker.
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        fields = memoryview(self._map).cast("Q")
        self._rows = [fields[at : at + layout.ROW_BYTES // 8] for at in range(0, len(fields), layout.ROW_BYTES // 8)]

    def read(self, slot: int) -> Progress:
        """Decode the row of the worker with this local rank."""
        row = self._rows[slot]
        return Progress(
            pid=row[layout.PID],
            steps=row[layout.STEPS],
            first_step_ns=row[layout.FIRST_STEP_NS],
            last_step_ns=row[layout.LAST_STEP_NS],
            stacks_armed=bool(row[layout.STACKS_ARMED]),
            asks_for_saves=bool(row[layout.ASKS_FOR_SAVES]),
            saves=row[layout.SAVES],
            saved_step=row[layout.SAVED_STEP] - 1 if row[layout.SAVED_STEP] else None,
            saved_after=row[layout.SAVED_AFTER],
            save_s=row[layout.SAVE_NS] / 1e9 if row[layout.SAVE_NS] else None,
            saved_ns=row[layout.SAVED_AT_NS],
            saving_s=row[layout.SAVES_NS] / 1e9,
            save_kept=row[layout.SAVE_KEPT],
            save_failed=row[layout.SAVE_FAILED],
            failed_saves=row[layout.FAILED_SAVES],
            ends_with=row[layout.ENDS_WITH],
            exit_handlers_done=bool(row[layout.EXIT_HANDLERS_DONE]),
            phase=layout.PHASES[phase := min(row[layout.PHASE], len(layout.PHASES) - 1)],  # the script can write anything here
            reports=row[layout.PROGRESS],
            sign_ns=row[layout.SIGN_NS],
            gaps=tuple(row[(gaps := layout.GAPS + phase * layout.GAP_BUCKETS) : gaps + layout.GAP_BUCKETS]),
            has_torch=bool(row[layout.OPTIM_HOOKED]),
            answers=row[layout.ANSWERS],
            total_steps=row[layout.TOTAL_STEPS] or None,
            steps_before=row[layout.STEPS_BEFORE] - 1 if row[layout.STEPS_BEFORE] else None,
            posts_status=bool(row[layout.POSTS_STATUS]),
            ended_ns=row[layout.ENDED_AT_NS],
            loads=row[layout.LOADS],
            loading_s=row[layout.LOADS_NS] / 1e9,
            checks=row[layout.CHECKS],
            checking_s=row[layout.CHECKS_NS] / 1e9,
            began_ns=row[layout.BEGAN_NS],
            spent_ns=tuple(row[layout.SPENT : layout.SPENT + len(layout.ACCOUNTS)]),
            account=layout.ACCOUNTS[self._account(row, phase)],
            tokens=row[layout.TOKENS],
            flops=row[layout.MEGAFLOPS] * 1e6,
            copies=row[layout.COPIES],
            copies_stall_s=row[layout.COPIES_STALL_NS] / 1e9,
            copied_step=row[layout.COPIED_STEP] - 1 if row[layout.COPIED_STEP] else None,
            copy_every=row[layout.COPY_EVERY],
            failed_copies=row[layout.FAILED_COPIES],
            unusable_copies=row[layout.UNUSABLE_COPIES],
            outstanding_ns=row[layout.OUTSTANDING_NS],
            outstanding_at_ns=row[layout.OUTSTANDING_AT_NS],
        )

    @staticmethod
    def _account(row: memoryview, phase: int) -> int:
        doing = min(row[layout.DOING], len(layout.ACCOUNTS))  # the script can write anything here
        return layout.account(doing, phase, row[layout.STEPS], row[layout.REPEATED])

    def read_all(self) -> list[Progress]:
        """Decode the rows of all workers of this node, by slot."""
        return [self.read(slot) for slot in range(len(self._rows))]

    def want_save(self, slot: int, number: int) -> None:
        """Ask this worker to look for the agreed step boundary of save on demand `number`."""
        self._rows[slot][layout.SAVE_WANTED] = number

    def repeat(self, steps: int) -> None:
        """Tell all workers how many of their first steps were done before, for `progress_layout.settle`. Before they start."""
        for row in self._rows:
            row[layout.REPEATED] = steps

    def remove(self) -> None:
        """Unlink the file. The memory stays until the last reader drops this object."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass


class EndingWorkers:
    """The workers of a round that are about to end with an error. They report it themselves and are not told to end.

    After an error, a worker runs its exit handlers. They may take as long as the grace period allows. The agent does not wait
    for the interpreter's teardown that follows (0.4 s with torch, more with a device).
    """

    def __init__(self, table: ProgressTable | None, slots: Iterable[int], wake_pipe: WakePipe) -> None:
        """Take the slots of this round's workers. table: None if there is no table; then nothing is known."""
        self._table = table
        self._slots = list(slots)
        self._wake_pipe = wake_pipe

    def fileno(self) -> int:
        """Return a descriptor that is readable when a worker has reported something."""
        return self._wake_pipe.fileno()

    def clear(self) -> None:
        """Forget the reports so far. Call `exit_codes` or `past_exit_handlers` after this, not before."""
        self._wake_pipe.clear()

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the workers that end with an error, by local rank, including those that have ended since."""
        return {slot: row.ends_with for slot, row in self._read() if row.ends_with}

    def past_exit_handlers(self) -> dict[int, int]:
        """Return the same for the workers whose exit handlers are done."""
        return {slot: row.ends_with for slot, row in self._read() if row.ends_with and row.exit_handlers_done}

    def _read(self) -> list[tuple[int, Progress]]:
        return [(slot, self._table.read(slot)) for slot in self._slots] if self._table is not None else []
