"""What a training script may call. Everything here does nothing where the script does not run under our agent.

Saves on demand. The agent asks for one before this job has to leave (a preemption, `elastic-ext checkpoints save`); all ranks
must act at the same step boundary, and they see the request at different moments. So:

1. Each agent shows the request to its workers, then says so in the store of the round. The last one to say so writes `go`.
2. From then on, at each boundary, rank 0 looks for `go`; when it is there, it writes the number of the next boundary into the
   store, and which requests the save will answer, and only then starts the step up to it.
3. Every other rank that sees the request looks, at each boundary, for that number.

No rank is past the agreed boundary when the number is there: to get to it a rank needs rank 0's part in the collectives of
that step, which rank 0 starts after it has written. Host code may run ahead of a GPU, so while a request is pending each
boundary waits for the device. Without a request a boundary costs the look at one word of memory.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import time
from typing import Any

from elastic_ext.base import log_records, round_store
from elastic_ext.base.errors import UsageError
from elastic_ext.workers import progress_layout, worker_env

logger = logging.getLogger(__name__)
log_records.install()  # here, too: scripts import a module of elastic_ext.training without asking the package for anything

CLOCK_S = 0.001  # what may be lost in adding and subtracting times
_PHASES = tuple(name for name in progress_layout.PHASES if name != "exit")


def resume_from() -> str | None:
    """The checkpoint that the agent has chosen for this round, the same on all ranks: a path or a URL; None: begin anew."""
    return os.environ.get("ELASTIC_EXT_RESUME_FROM") or None


def resume_step() -> int | None:
    """Its step, by its content, else by its name; None where neither tells one, or there is nothing to resume from."""
    step = os.environ.get("ELASTIC_EXT_RESUME_STEP")
    return int(step) if step else None


def save_requested() -> bool:
    """Shall this job save a checkpoint now? Every rank must ask, once at the end of each optimizer step; all get the same answer.

    A step must have a collective that all ranks take part in (or depend on), as it has with DDP, FSDP and pipelines.
    """
    boundaries = _boundaries()
    return boundaries is not None and boundaries.passed()


def report_saved(step: int, seconds: float) -> None:
    """A checkpoint of `step` is complete on its storage, `seconds` after it was asked for. Any rank may say so, best all do."""
    boundaries = _boundaries()
    if boundaries is not None:
        boundaries.saved(step, seconds)


def report_save_failed() -> None:
    """The checkpoint that was asked for last did not come to be; nobody needs to wait for it."""
    boundaries = _boundaries()
    if boundaries is not None:
        boundaries.failed()


def report_progress() -> None:
    """Something has been done that no step of a torch.optim.Optimizer tells of, a batch of an evaluation, say."""
    words = _words()
    if words is not None:
        words[progress_layout.PROGRESS] += 1
        progress_layout.note_sign(words, time.monotonic_ns())


def phase(name: str) -> Phase:
    """From now on this process does this: "compile", "data", "step", "checkpoint" or "eval"; "" for none of them.

    Either until the next call, or as `with elastic_ext.phase("eval"):` until the block ends. For the thread that trains: what
    runs beside it has no phase. The hang detector has more patience with a compile, a checkpoint and an evaluation.

    Raises:
        UsageError: another name.
    """
    if name not in _PHASES:
        raise UsageError(f"phase({name!r}): expected one of {', '.join(filter(None, _PHASES))}")
    words = _words()
    before = words[progress_layout.PHASE] if words is not None else 0
    _enter(progress_layout.PHASES.index(name))
    return Phase(before)


class Phase:
    """A phase that has begun; the end of a `with` block brings back the one before."""

    def __init__(self, before: int) -> None:
        self._before = before

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, *exc: object) -> None:
        _enter(self._before)


def _enter(phase_: int) -> None:
    words = _words()
    if words is not None:
        now_ns = time.monotonic_ns()
        progress_layout.note_sign(words, now_ns)  # of the phase that ends
        words[progress_layout.PHASE_SINCE_NS] = now_ns
        words[progress_layout.PHASE] = phase_


def _words() -> memoryview | None:
    boundaries = _boundaries()
    return boundaries.words if boundaries is not None else None


class _Boundaries:
    """The step boundaries of this process."""

    def __init__(self, told: worker_env.WorkerMessage) -> None:
        """told: what the agent said to this worker. Raises KeyError, OSError or ValueError where that is not all there."""
        first = told["slot"] * progress_layout.ROW_BYTES
        with open(told["progress"], "r+b") as file:
            self._map = mmap.mmap(file.fileno(), first + progress_layout.ROW_BYTES)
        self.words = memoryview(self._map)[first:].cast("Q")
        self._news: str = told["news"]
        self._host, self._port = told["store"]
        self._rank = int(os.environ["RANK"])
        self._alone = int(os.environ["WORLD_SIZE"]) == 1
        self._store: Any = None
        self._number = 0  # of this boundary
        self._taken = 0  # the last request that this process has acted on
        self._taken_at = 0.0  # monotonic

    def passed(self) -> bool:
        self.words[progress_layout.ASKS_FOR_SAVES] = 1
        self._number += 1
        wanted = self.words[progress_layout.SAVE_WANTED]
        if wanted <= self._taken:
            return False
        taken = wanted if self._alone else self._agreed(wanted)
        if not taken:
            return False
        self._taken, self._taken_at = taken, time.monotonic()
        return True

    def _agreed(self, wanted: int) -> int:
        """Is this the boundary of a save? The number of the last request that it answers; 0: it is not.

        The oldest request that is not answered is looked for, which is the same on all ranks; the newest is not.
        """
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        oldest = self._taken + 1
        try:
            store = self._connected()
            at, go = f"save/{oldest}/at", f"save/{oldest}/go"
            if store.check([at]):
                agreed, answered = map(int, store.get(at).split())
                if agreed < self._number:  # not in a script that keeps to what save_requested() asks for
                    logger.error("the save on demand was agreed for boundary %s, and this is %s: not saved", agreed, self._number)
                    self._taken = answered
                    self.failed()
                return answered if agreed == self._number else 0
            if self._rank == 0 and store.check([go]):
                store.set(at, f"{self._number + 1} {wanted}")
        except (RuntimeError, ValueError) as error:
            logger.warning("no save on demand, the store of the round does not answer: %s", error)
            self._taken = wanted
        return 0

    def _connected(self) -> Any:
        if self._store is None:
            self._store = round_store.connect(self._host, self._port)
        return self._store

    def saved(self, step: int, seconds: float) -> None:
        words = self.words
        words[progress_layout.SAVED_STEP] = step + 1
        words[progress_layout.SAVE_NS] = max(1, int(seconds * 1e9))
        words[progress_layout.SAVES] += 1
        words[progress_layout.FAILED_SAVES] = 0
        if time.monotonic() - seconds >= self._taken_at - CLOCK_S:  # not one that was under way when this one was agreed
            words[progress_layout.SAVE_KEPT] = self._taken
        worker_env.wake(self._news)

    def failed(self) -> None:
        self.words[progress_layout.SAVE_FAILED] = self._taken
        self.words[progress_layout.FAILED_SAVES] += 1
        worker_env.wake(self._news)


_found: dict[int, _Boundaries | None] = {}  # by pid: a child that the script forks is no worker of the agent's


def _boundaries() -> _Boundaries | None:
    pid = os.getpid()
    if pid not in _found:
        _found[pid] = None if _found else _connect()
    return _found[pid]


def _connect() -> _Boundaries | None:
    text = os.environ.get(worker_env.WORKER_ENV)
    if not text:
        return None
    try:
        return _Boundaries(worker_env.loads(text))
    except (KeyError, TypeError, ValueError, OSError) as error:
        logger.warning("no saves on demand in this worker: %s %s", type(error).__name__, error)
        return None
