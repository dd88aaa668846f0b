"""Checkpoints, the script's side: which one to resume from, and what the agent learns of saves, loads and copies in memory.

Saves on demand: the agent asks for one, e.g. before a preemption or for `elastic-ext checkpoints save`.
All ranks must save at the same step boundary, but they see the request at different moments. So:

1. Each agent shows the request to its workers, then counts itself in the store of the round. The last agent writes `go`.
2. From then on, rank 0 looks for `go` at each boundary. When `go` is there, rank 0 writes the number of the next boundary and the
   last request that the save will answer to the store, and only then starts the step up to that boundary.
3. Every other rank that sees the request looks for that number at each boundary.

The keys are those of `save/...` in `base.round_store`.

Invariant: no rank is past the agreed boundary when its number appears. To get there, a rank needs rank 0's part in the
collectives of that step, and rank 0 starts those after it has written the number. Host code may run ahead of a GPU, so while a
request is pending, each boundary waits for the device. Without a request, a boundary costs one read of a word of memory.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from contextlib import suppress

from elastic_ext.base import contracts, errors, round_store
from elastic_ext.training.progress import Worker, this_worker
from elastic_ext.workers import progress_layout

logger = logging.getLogger(__name__)

CLOCK_S = 0.001  # tolerance for adding and subtracting times


def save_requested() -> bool:
    """Return whether to save a checkpoint now. Call this on every rank, once at the end of each optimizer step.

    All ranks get the same answer if each step has a collective in which all ranks take part (or on which they depend), as with
    DDP, FSDP and pipelines.
    """
    return _boundaries_of(this_worker()).reach_next()


def note_save_begins(step: int) -> None:
    """Note that the state of this step is what will be saved. Without it, `report_saved` takes the state of its own moment."""
    _boundaries_of(this_worker()).begins(step)


def report_saved(step: int, seconds: float) -> None:
    """Report that a checkpoint of this step is complete on its storage. One rank must call this; all ranks should.

    seconds: time from the request to the complete checkpoint.
    """
    sys.audit("elastic_ext.saved", step)  # for the record of saves: see workers/bootstrap/saves.py
    _boundaries_of(this_worker()).saved(step, seconds)


def report_save_failed() -> None:
    """Report that the requested checkpoint failed, so that no process waits for it."""
    _boundaries_of(this_worker()).failed()


class _StepBoundaries:
    """The step boundaries of this worker, and the agreement on those at which all ranks save."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._store: round_store.Store | None = None
        self._number = 0  # the number of this boundary
        self._answered = 0  # the last request that this process has acted on
        self._answered_at = 0.0  # time.monotonic()
        self._begun: tuple[int, int] | None = None  # step of the save that began last, and the optimizer steps by then

    def reach_next(self) -> bool:
        """Count a boundary; return whether all ranks save at it."""
        self._number += 1
        words = self._worker.row.words
        words[progress_layout.ASKS_FOR_SAVES] = 1
        requested = words[progress_layout.SAVE_WANTED]  # number of the newest request; 0: none
        if requested <= self._answered:
            return False
        answered = requested if self._worker.world_size == 1 else self._agree(requested)
        if not answered:
            return False
        self._answered, self._answered_at = answered, time.monotonic()
        return True

    def _agree(self, requested: int) -> int:
        """Return the last request that a save at this boundary answers; 0 to not save here.

        All ranks look up the oldest unanswered request, which is the same on all ranks; the newest may differ.
        """
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        oldest = self._answered + 1
        try:
            store = self._connected()
            at, go = round_store.save_at(oldest), round_store.save_go(oldest)
            if store.check([at]):
                agreed, answered = map(int, store.get(at).split())
                if agreed < self._number:  # the script does not call save_requested() at every step on all ranks
                    logger.error(
                        "no save on demand: it was agreed for step boundary %s, and this is boundary %s; "
                        "call save_requested() on every rank after each optimizer step",
                        agreed,
                        self._number,
                    )
                    self._answered = answered
                    self.failed()
                return answered if agreed == self._number else 0
            if self._worker.rank == 0 and store.check([go]):
                store.set(at, f"{self._number + 1} {requested}")
        except (RuntimeError, ValueError) as error:
            logger.warning("no save on demand: the store of the round does not answer: %s", error)
            self._answered = requested
        return 0

    def _connected(self) -> round_store.Store:
        if self._store is None:
            self._store = round_store.connect(*self._worker.store)
        return self._store

    def begins(self, step: int) -> None:
        self._begun = step, self._worker.row.words[progress_layout.STEPS]

    def saved(self, step: int, seconds: float) -> None:
        """Report a save; see `report_saved`. A save that was already under way does not answer the last request."""
        answers = time.monotonic() - seconds >= self._answered_at - CLOCK_S
        begun, row = self._begun, self._worker.row
        after = begun[1] if begun is not None and begun[0] == step else row.words[progress_layout.STEPS]
        row.report_saved(step, seconds, self._answered if answers else None, after)

    def failed(self) -> None:
        """Report a failed save; see `report_save_failed`."""
        self._worker.row.report_save_failed(self._answered)


_boundaries_of = functools.cache(_StepBoundaries)


def save_dir(otherwise: str = "") -> str:
    """Return where this script should save in this round: `local_dir` if the agent copies from there, else `checkpoint_dir`.

    otherwise: the directory without an agent, or where its job has no `checkpoint_dir`; "": this raises UsageError then.
    """
    found = os.environ.get(contracts.SAVE_DIR) or os.environ.get(contracts.CHECKPOINT_DIR) or otherwise
    if found and found == os.environ.get(contracts.LOCAL_DIR):
        with suppress(OSError):  # there is no room for the note, and so for no save
            note_used(found)
    if not found:
        raise errors.UsageError(
            "save_dir() knows no directory, because no agent with a checkpoint_dir runs this script: set checkpoint_dir, or call "
            'save_dir("DIRECTORY")'
        )
    return found


def note_used(local_dir: str) -> None:
    """Note that this script saves there, so all of it is copied at the end: `used` in `checkpoints.copying.notes`."""
    folder = os.path.join(local_dir, ".elastic_ext")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "used"), "a"):
        pass


def resume_from() -> str | None:
    """Return the checkpoint that the agent chose for this round; it is the same on all ranks. None to start from nothing.

    It is a path or a URL: of this rank's own file, if each rank wrote one. Once a script has called this, no restart of its job
    begins from nothing where only the user can say which checkpoint is right.
    """
    note_resumes()
    return os.environ.get(contracts.RESUME_FROM) or None


def note_resumes() -> None:
    """Let the agent know that this script takes its word for what to resume from."""
    this_worker().row.words[progress_layout.RESUMES] = 1


def resume_step() -> int | None:
    """Return the step in the content of the checkpoint of `resume_from`, else in its name; None if neither holds one."""
    step = os.environ.get(contracts.RESUME_STEP)
    return int(step) if step else None
