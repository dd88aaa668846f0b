"""What the workers of this node have hashed of their replicas, for comparison with those of other nodes (`integrity_every`)."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import defaultdict
from contextlib import suppress

from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.base.records import is_name
from elastic_ext.failures.replicas import Hashed
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.workers import worker_env

logger = logging.getLogger(__name__)

REPORT_S = 1.0  # the least time between two reports to the other nodes: each is a write to the job's store
MOST = 128  # hashes of a worker: nine each of several sets


def read(workers: LocalWorkers) -> tuple[Hashed, ...]:
    """Return what the workers have hashed, those with the same result together. An unreadable file says nothing."""
    ranks: defaultdict[tuple[str, int, int, str], list[int]] = defaultdict(list)
    for path, rank in _files(workers):
        for each in _entries(path):
            ranks[each].append(rank)
    return tuple(Hashed(*each, tuple(of)) for each, of in ranks.items())


def _files(workers: LocalWorkers) -> list[tuple[str, int]]:
    """Return the path and the rank of each worker's file."""
    progress = workers.progress.path if workers.progress is not None else None
    paths = ((worker_env.hashes_path(progress, local_rank), rank) for local_rank, rank in workers.ranks.items())
    return [(path, rank) for path, rank in paths if path is not None]


def _entries(path: str) -> list[tuple[str, int, int, str]]:
    try:
        with open(path, "rb") as file:
            found = json.load(file)[-MOST:]
        return [(of, replicas, step, value) for of, replicas, step, value in found if _is_sound(of, replicas, step, value)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.debug("the hashes in %s cannot be read: %s", path, error)
        return []


def _is_sound(of: object, replicas: object, step: object, value: object) -> bool:
    names = all(isinstance(each, str) and is_name(each) for each in (of, value))
    return names and all(type(each) is int and 0 <= each < 2**31 for each in (replicas, step))


class ReplicaWatch(Companion):
    """Reports what the workers have hashed to the other nodes, as the workers wake the agent for it."""

    def __init__(self, handler: Rendezvous) -> None:
        self._handler = handler
        self._reported: tuple[Hashed, ...] = ()
        self._report_at = -math.inf  # not before
        self._late = False  # there was an event before that

    def workers_started(self, workers: LocalWorkers) -> None:
        self._reported = ()

    def next_check_s(self) -> float:
        return max(0.0, self._report_at - time.monotonic()) if self._late else math.inf

    def check(self, workers: LocalWorkers) -> None:
        now = time.monotonic()
        self._late = now < self._report_at
        if self._late:
            return
        hashed = read(workers)
        if hashed != self._reported:
            self._reported, self._report_at = hashed, now + REPORT_S
            self._handler.part.report_hashed(hashed)

    def workers_ended(self, workers: LocalWorkers) -> None:
        for path, _ in _files(workers):
            with suppress(FileNotFoundError):
                os.unlink(path)
