"""The agent's side of the progress words: one slot of shared memory per worker, written by the bootstrap, read here.

Reading costs the training nothing: no message, no lock. The layout is the bootstrap's.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from elastic_ext.workers import bootstrap


@dataclass(frozen=True)
class Progress:
    """What one worker's slot says.

    Attributes:
        pid: of the worker whose bootstrap is in place; 0: none is, nothing is known of this worker.
        steps: optimizer steps done since it started.
        first_step_ns, last_step_ns: time.monotonic_ns() of them; 0 before the first.
        stacks_armed: the signal that dumps its stacks has a handler. Without one that signal would kill it.
    """

    pid: int
    steps: int
    first_step_ns: int
    last_step_ns: int
    stacks_armed: bool

    @property
    def first_step_done(self) -> bool | None:
        """None: not known."""
        return self.steps > 0 if self.pid else None


class ProgressBoard:
    """The slots of one round's workers."""

    def __init__(self, path: str, workers: int) -> None:
        """path: a file to create, best on tmpfs. workers: how many slots. Raises OSError where there is no room for it."""
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
        return Progress(
            pid=words[at + bootstrap.PID],
            steps=words[at + bootstrap.STEPS],
            first_step_ns=words[at + bootstrap.FIRST_STEP_NS],
            last_step_ns=words[at + bootstrap.LAST_STEP_NS],
            stacks_armed=bool(words[at + bootstrap.STACKS_ARMED]),
        )

    def remove(self) -> None:
        """Unlink the file. The memory stays until the last reader has let go of this object."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
