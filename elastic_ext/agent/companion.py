"""The seam between the agent's loop and everything that works beside the workers.

Checkpoint copier, standby pool, hang watch, saves on demand: each is a `Companion`. The loop calls all of them at the same
moments of a round and knows nothing else about them. Some can do more (provide a worker's process, a descriptor to wait for);
the code that needs that calls them by name. A part of the agent that can be off is a `feature.Feature`, which gives companions.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from elastic_ext.base.records import RecordError
from elastic_ext.failures.ledger import Report
from elastic_ext.hangs.detector import Stuck
from elastic_ext.telemetry.agent_metrics import WorkerProgress
from elastic_ext.workers.processes import WorkerProcesses
from elastic_ext.workers.progress import Progress, ProgressTable

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

END_S = 3.0  # how long the end of an agent waits for its receivers (files and pipes, servers, etcd), all of them together
HURRIED_S = 1.0  # the same where a signal ends the agent: the platform will kill it
LEAST_S = 0.2  # for each, even if another one has used up the time: its work needs a moment


@dataclass(frozen=True)
class RoundPlace:
    """This node in one round.

    host: its name. node: its group rank. nodes, world: number of nodes and ranks. store_at: host and port of the round's store.
    """

    host: str
    node: int
    nodes: int
    world: int
    store_at: tuple[str, int]


@dataclass(frozen=True)
class LocalWorkers:
    """The workers of this node in one round. All mappings are by local rank."""

    processes: WorkerProcesses
    progress: ProgressTable | None  # None if there was no room for it, so that their progress is unknown
    ranks: Mapping[int, int]  # global ranks
    # error_files, stacks_files: paths to which they write their error files and their stacks
    error_files: Mapping[int, str]
    stacks_files: Mapping[int, str]
    resumed_at: int | None = None  # step of the checkpoint that they resume from; 0: the beginning; None: unknown

    def read_progress(self) -> list[Progress]:
        """Return the progress of all workers, by local rank; an empty list without a progress table."""
        return self.progress.read_all() if self.progress is not None else []

    def rows(self) -> list[WorkerProgress]:
        """Return those that report their progress, as the metrics show them. Any thread may call this."""
        rows = enumerate(self.read_progress())
        return [WorkerProgress(local_rank, self.ranks[local_rank], row) for local_rank, row in rows if row.pid]

    def running_pids(self) -> dict[int, int]:
        """Return the pids of the workers that have not ended, by local rank."""
        return {local_rank: self.processes.pids[local_rank] for local_rank in self.processes.running}


def read_file_of_worker(path: str | None, decode: Callable[[bytes, str], Value], most: int = -1) -> Value | None:
    """Return what a worker has written to its file; None if the file is not there, or cannot be read. most: bytes of it."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return decode(file.read(most), path)
    except FileNotFoundError:
        return None
    except (OSError, RecordError) as error:
        logger.debug("cannot read %s: %s", path, error)
        return None


class Companion:
    """A part of the agent that works beside the workers. Override the moments that matter; each must return quickly."""

    def workers_started(self, workers: LocalWorkers) -> None:
        """Called when all workers of a new round run."""

    def check(self, workers: LocalWorkers) -> None:
        """Called after an event, or when a check is due, while the workers keep running."""

    def next_check_s(self) -> float:
        """Return the seconds until `check` is due even without an event."""
        return math.inf

    def reported(self, report: Report, workers: LocalWorkers) -> Report:
        """Return this node's report on the failure of a round, with what this companion knows. The workers have been stopped."""
        return report

    def workers_ended(self, workers: LocalWorkers) -> None:
        """Called when the round is over. This is the last chance to read the progress table."""


class StallWatch(Companion, ABC):
    """A companion that knows whether the workers of this node stall, and finds out which of them the others wait for."""

    hung: Mapping[int, Stuck]  # those that the others waited for, by local rank, once `examine` has found out

    @property
    @abstractmethod
    def stalled(self) -> bool:
        """Whether all workers of this node stall, as of the last check: the job may hang."""

    @abstractmethod
    def examine(self, workers: LocalWorkers) -> list[str]:
        """Find out and log where each worker is when the whole job hangs; return one text per worker for the verdict."""


class EndLimit:
    """Time that several waits share. All receivers start first, and are then waited for: so they work side by side."""

    def __init__(self) -> None:
        self._by: float | None = None

    def begin(self, limit_s: float) -> None:
        """Let the time begin. limit_s: seconds for all."""
        self._by = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Return how long the next one may be waited for, in seconds. The first call begins, if nothing has."""
        if self._by is None:
            self.begin(END_S)
            return END_S
        return max(LEAST_S, self._by - time.monotonic())
