"""The agent's side of the progress words: one slot of shared memory per worker, written by the bootstrap, read here.

Reading costs the training nothing: no message, no lock. The layout is the bootstrap's.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_ext.workers import bootstrap
from elastic_ext.workers.wake_pipe import WakePipe


@dataclass(frozen=True)
class Progress:
    """What one worker's slot says.

    Attributes:
        pid: of the worker whose bootstrap is in place; 0: none is, nothing is known of this worker.
        steps: optimizer steps done since it started.
        first_step_ns, last_step_ns: time.monotonic_ns() of them; 0 before the first.
        stacks_armed: the signal that dumps its stacks has a handler. Without one that signal would kill it.
        asks_for_saves: it asks at its step boundaries whether to save (see `elastic_ext.training.saves`).
        saves: checkpoints that it has seen committed; saved_step, save_s: of the last one, and how long it took.
        failed_saves: one after the other, up to now.
        ends_with: exit code of a worker whose script is over and that ends with an error, or 0.
        exit_handlers_done: all that the script can notice of its end is over.
        save_kept, save_failed: numbers of the last save on demand that was committed, and of the last that was not.
        phase: what the script says it does, one of bootstrap.PHASES; "": it does not say.
        reports: of progress, besides the steps.
        sign_ns: time.monotonic_ns() of the last sign of life (a step, a report, a change of phase); 0: none yet.
        gaps: between signs of life in this phase: how many of less than 2 ** index ms.
    """

    pid: int
    steps: int
    first_step_ns: int
    last_step_ns: int
    stacks_armed: bool
    asks_for_saves: bool = False
    saves: int = 0
    saved_step: int | None = None
    save_s: float | None = None
    save_kept: int = 0
    save_failed: int = 0
    failed_saves: int = 0
    ends_with: int = 0
    exit_handlers_done: bool = False
    phase: str = ""
    reports: int = 0
    sign_ns: int = 0
    gaps: tuple[int, ...] = ()

    @property
    def first_step_done(self) -> bool | None:
        """None: not known."""
        return self.steps > 0 if self.pid else None


class ProgressTable:
    """The slots of one round's workers."""

    def __init__(self, path: str, workers: int) -> None:
        """path: a file to create, best on tmpfs. workers: how many slots. Raises OSError where there is no room for it."""
        self._workers = workers
        self.path = path
        size = workers * bootstrap.SLOT_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Not ftruncate: a hole that a full tmpfs cannot fill is SIGBUS at the first touch, here or in the worker.
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("Q")

    def read(self, slot: int) -> Progress:
        words = self._words
        at = slot * bootstrap.SLOT_BYTES // 8
        phase = min(words[at + bootstrap.PHASE], len(bootstrap.PHASES) - 1)  # the script can write here what it likes
        gaps = at + bootstrap.GAPS + phase * bootstrap.GAP_BUCKETS
        return Progress(
            pid=words[at + bootstrap.PID],
            steps=words[at + bootstrap.STEPS],
            first_step_ns=words[at + bootstrap.FIRST_STEP_NS],
            last_step_ns=words[at + bootstrap.LAST_STEP_NS],
            stacks_armed=bool(words[at + bootstrap.STACKS_ARMED]),
            asks_for_saves=bool(words[at + bootstrap.ASKS_FOR_SAVES]),
            saves=words[at + bootstrap.SAVES],
            saved_step=words[at + bootstrap.SAVED_STEP] - 1 if words[at + bootstrap.SAVED_STEP] else None,
            save_s=words[at + bootstrap.SAVE_NS] / 1e9 if words[at + bootstrap.SAVE_NS] else None,
            save_kept=words[at + bootstrap.SAVE_KEPT],
            save_failed=words[at + bootstrap.SAVE_FAILED],
            failed_saves=words[at + bootstrap.FAILED_SAVES],
            ends_with=words[at + bootstrap.ENDS_WITH],
            exit_handlers_done=bool(words[at + bootstrap.EXIT_HANDLERS_DONE]),
            phase=bootstrap.PHASES[phase],
            reports=words[at + bootstrap.PROGRESS],
            sign_ns=words[at + bootstrap.SIGN_NS],
            gaps=tuple(words[gaps : gaps + bootstrap.GAP_BUCKETS]),
        )

    def read_all(self) -> list[Progress]:
        """Of all workers of this node, by slot."""
        return [self.read(slot) for slot in range(self._workers)]

    def want_save(self, slot: int, number: int) -> None:
        """Have this worker look for the agreed step boundary of this save on demand."""
        self._words[slot * bootstrap.SLOT_BYTES // 8 + bootstrap.SAVE_WANTED] = number

    def remove(self) -> None:
        """Unlink the file. The memory stays until the last reader has let go of this object."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass


class Leaving:
    """Which workers of a round are about to end with an error. They say so themselves, and are not told to end.

    After an error a worker runs its exit handlers, which may take what they need, within the grace. What comes then, in which
    the interpreter takes itself apart (0.4 s with torch, more with a device), is not waited for.
    """

    def __init__(self, board: ProgressTable | None, slots: Iterable[int], news: WakePipe) -> None:
        """news: readable when one of them has something to say."""
        self._board = board
        self._slots = list(slots)
        self._news = news

    def fileno(self) -> int:
        return self._news.fileno()

    def clear(self) -> None:
        self._news.clear()

    def codes(self) -> dict[int, int]:
        """Exit code by local rank; those that have ended since are among them."""
        if self._board is None:
            return {}
        return {slot: code for slot in self._slots if (code := self._board.read(slot).ends_with)}

    def through(self) -> dict[int, int]:
        """Those of them whose exit handlers are done."""
        board = self._board
        if board is None:
            return {}
        return {slot: code for slot, code in self.codes().items() if board.read(slot).exit_handlers_done}
