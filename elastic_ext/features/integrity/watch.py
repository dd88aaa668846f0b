"""Replicas that must be equal (`integrity_every`): what the workers of this node have hashed, for comparison with other nodes."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from elastic_ext.agent.companion import Companion, LocalWorkers, read_file_of_worker
from elastic_ext.agent.feature import Feature, RoundParts
from elastic_ext.base import printable
from elastic_ext.failures.joint_evidence import Hashed, WorkerHashes, decode_hashes
from elastic_ext.failures.ledger import Report
from elastic_ext.rendezvous import topics
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.status import job_status
from elastic_ext.workers import worker_env

logger = logging.getLogger(__name__)

REPORT_S = 1.0  # the least time between two reports to the other nodes: each is a write to the job's store
MOST_HASHES = 128  # hashes of a worker: nine each of several sets

ShowUncompared = Callable[[int | None, str], None]
"""Gets the number of workers of which nothing is compared, and why; None if no worker runs."""


class Integrity(Feature):
    _uncompared = ""

    def message(self) -> Mapping[str, object]:
        return {"integrity_every": self.parts.settings.integrity_every}

    def beside_round(self, round_: RoundParts) -> Companion:
        return ReplicaWatch(self.parts.job, self._show)

    def _show(self, workers: int | None, why: str) -> None:
        observation, why = self.parts.observation, printable.cut(why, job_status.MAX_WHY)
        observation.of_features.show(replicas_uncompared_workers={(): workers} if workers is not None else {})
        before, self._uncompared = self._uncompared, why
        observation.node.found("integrity", lambda report: replace(report, uncompared=why), before != why)


def hashed_by(workers: LocalWorkers) -> tuple[Hashed, ...]:
    """Return what the workers have hashed, those with the same result together. An unreadable file says nothing."""
    return _together(_hashes(workers))


def _hashes(workers: LocalWorkers) -> dict[int, WorkerHashes]:
    """Return what each worker has written so far, by rank."""
    found = {rank: read_file_of_worker(path, decode_hashes) for path, rank in _hash_files(workers)}
    return {rank: hashes for rank, hashes in found.items() if hashes is not None}


def _together(found: Mapping[int, WorkerHashes]) -> tuple[Hashed, ...]:
    ranks: defaultdict[Hashed, list[int]] = defaultdict(list)
    for rank, worker in found.items():
        for each in worker.hashed[-MOST_HASHES:]:
            ranks[replace(each, ranks=())].append(rank)
    return tuple(replace(each, ranks=tuple(of)) for each, of in ranks.items())


def _hash_files(workers: LocalWorkers) -> list[tuple[str, int]]:
    """Return the path and the rank of each worker's file."""
    progress = workers.progress.path if workers.progress is not None else None
    paths = ((worker_env.hashes_path(progress, local_rank), rank) for local_rank, rank in workers.ranks.items())
    return [(path, rank) for path, rank in paths if path is not None]


class ReplicaWatch(Companion):
    """Reports what the workers have hashed to the other nodes, as the workers wake the agent for it, and shows what is not."""

    def __init__(self, handler: Rendezvous, show: ShowUncompared) -> None:
        self._handler, self._show = handler, show
        self._reported: tuple[Hashed, ...] = ()
        self._logged: set[str] = set()
        self._report_at = -math.inf  # not before
        self._late = False  # there was an event before that

    def workers_started(self, workers: LocalWorkers) -> None:
        self._reported, self._logged = (), set()
        self._show(0, "")

    def next_check_s(self) -> float:
        return max(0.0, self._report_at - time.monotonic()) if self._late else math.inf

    def check(self, workers: LocalWorkers) -> None:
        now = time.monotonic()
        self._late = now < self._report_at
        if self._late:
            return
        found = _hashes(workers)
        hashed = _together(found)
        if hashed != self._reported:
            self._reported, self._report_at = hashed, now + REPORT_S
            self._handler.part.post(topics.HASHED, topics.Replicas(hashed))
        uncompared = [worker.uncompared for worker in found.values() if worker.uncompared]
        self._show(len(uncompared), next(iter(uncompared), ""))
        self._log(found)

    def _log(self, found: Mapping[int, WorkerHashes]) -> None:
        """Log once in a round what is not compared, with the ranks here. A note is the same on all ranks: rank 0 gives it."""
        faults = [(rank, text) for rank, each in found.items() for text in (each.off, each.note if rank == 0 else "")]
        for text in dict.fromkeys(text for _, text in faults if text and text not in self._logged):
            self._logged.add(text)
            of = printable.ranks_in_words(rank for rank, fault in faults if fault == text)
            logger.warning("elastic_ext: integrity_every: %s: %s", of, text)

    def reported(self, report: Report, workers: LocalWorkers) -> Report:
        return replace(report, hashed=hashed_by(workers))

    def workers_ended(self, workers: LocalWorkers) -> None:
        self._log(_hashes(workers))
        self._show(None, "")
        for path, _ in _hash_files(workers):
            with suppress(FileNotFoundError):
                os.unlink(path)
