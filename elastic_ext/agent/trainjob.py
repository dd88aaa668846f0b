"""Tells Kubeflow Trainer how far the job is, where it asks for that, from the agent of rank 0.

Only the agent whose node has rank 0 in this round posts. A script that posts the status itself (with Hugging Face's Trainer or
Kubeflow's SDK) knows more than the agent, and each of two would undo the other's status; so the agent then posts
nothing. With DISABLE_KUBEFLOW_INTEGRATION=TRUE the Trainer does not post, and the agent does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.base.settings import Settings
from elastic_ext.observe.trainjob import State, TrainerStatus, Training, status_of
from elastic_ext.observe.trainjob_posts import Poster, Target, target_of
from elastic_ext.workers.progress import Progress


def reporting(
    settings: Settings, environ: Mapping[str, str], restarts: Callable[[], int], gauges: Callable[[], Mapping[str, float]]
) -> list[TrainJobReports]:
    """Return the companion that reports to Kubeflow Trainer, if it asks for reports.

    restarts: see Training. gauges: what the script of rank 0 shows of itself, if it is on this node.
    """
    target = target_of(environ) if settings.trainjob_interval > 0 else None
    return [TrainJobReports(target, settings.trainjob_interval, restarts, gauges)] if target is not None else []


def training_of(worker: Progress, resumed_at: int | None, restarts: int) -> Training | None:
    """Return how far the training is; None if it has not begun, or if the script posts its status itself.

    Args:
        worker: rank 0.
        resumed_at: step of the checkpoint that the round resumes from. Where it is unknown, the round starts from the beginning.
    """
    if not worker.pid or not worker.steps or worker.posts_status:
        return None
    before = worker.steps_before if worker.steps_before is not None else resumed_at or 0
    stepping_s = (worker.last_step_ns - worker.first_step_ns) / 1e9
    step_s = max(0.0, stepping_s) / (worker.steps - 1) if worker.steps > 1 else None
    return Training(before + worker.steps, worker.total_steps, step_s, restarts)


class TrainJobReports(Companion):
    """Posts while rank 0 is on this node."""

    def __init__(
        self, target: Target, interval_s: float, restarts: Callable[[], int], gauges: Callable[[], Mapping[str, float]]
    ) -> None:
        self._restarts, self._read_gauges = restarts, gauges
        self._lock = threading.Lock()
        self._workers: LocalWorkers | None = None  # of this round, if rank 0 is among them
        self._slot = 0  # its local rank
        self._last: Training | None = None
        self._gauges: Mapping[str, float] = {}  # of rank 0
        self._begun = False  # this round's first step was told
        self._done = False
        self._poster = Poster(target, interval_s, self.status)

    def workers_started(self, workers: LocalWorkers) -> None:
        slots = [local_rank for local_rank, rank in workers.ranks.items() if rank == 0]
        with self._lock:
            self._workers = workers if slots else None
            self._begun = False
            if slots:
                self._slot = slots[0]
            else:
                self._last, self._gauges = None, {}  # another node posts from now on

    def check(self, workers: LocalWorkers) -> None:
        with self._lock:
            tell = not self._begun and self._read() is not None
            self._begun = self._begun or tell
        if tell:
            self._poster.changed()

    def workers_ended(self, workers: LocalWorkers) -> None:
        with self._lock:
            self._last = self._read() or self._last
            self._gauges = self._read_gauges() or self._gauges  # those of the next round are others
            self._workers = None
            tell = self._last is not None and (workers.processes.failed or bool(workers.processes.running))
        if tell:  # else the job ends well, which job_ended tells, or other nodes still train
            self._poster.changed()

    def job_ended(self, clean: bool) -> None:
        if clean:
            with self._lock:
                self._done = True
            self._poster.changed()
        self._poster.end()

    def flush(self, limit_s: float) -> None:
        self._poster.close(limit_s)

    def status(self) -> TrainerStatus | None:
        """Return the status to post; None if this agent has nothing to post. Any thread may call this."""
        with self._lock:
            now = self._read()
            self._last = now or self._last
            self._gauges = self._read_gauges() or self._gauges  # none between two rounds, nor before the script sets them
            trains = now is not None and self._workers is not None and not self._workers.processes.stopped
            state = State.DONE if self._done else State.TRAINING if trains else State.STOPPED
            return status_of(self._last, state, time.time(), self._gauges) if self._last is not None else None

    def _read(self) -> Training | None:
        """Return how far rank 0 is, if it trains on this node. The caller holds the lock."""
        workers = self._workers
        if workers is None or workers.progress is None:
            return None
        return training_of(workers.progress.read(self._slot), workers.resumed_at, self._restarts())
