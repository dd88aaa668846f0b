"""This agent's metrics, and its goodput: a ledger of what the agent and its workers do, shared with the job."""

from __future__ import annotations

import functools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

import elastic_ext
from elastic_ext.base import goodput, kinds
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.base.goodput import Shared, Spent
from elastic_ext.base.settings import Settings
from elastic_ext.rendezvous.run_id import host_name
from elastic_ext.telemetry import families
from elastic_ext.telemetry.agent_metrics import AgentMetrics, GpuQuery, WorkerProgress, gpu_uuids, gpus_by_local_rank
from elastic_ext.telemetry.collectors import GoodputCollector, goodput_status
from elastic_ext.telemetry.goodput import Look, TimeLedger
from elastic_ext.workers.progress import Progress, ProgressTable
from elastic_ext.workers.standby.rules import ColdReason

logger = logging.getLogger(__name__)

SHARE_S = 10.0  # mean time between two writes to etcd or a file; a killed agent loses one and a half times that at most
WRITES_PER_S = 10.0  # of all agents of a job together
AT_ROUNDS_END = 10  # about this many agents write at once: all nodes write other records then, and a recovery waits for those
ROUNDING_S = 1e-3  # of a sum
FIRST_SHARE_S = 2.0  # how long the first round waits for what earlier agents of this job have reached


def progress_rows(workers: Sequence[Progress], ranks: Mapping[int, int]) -> list[WorkerProgress]:
    """Return a row for each worker that reports its progress. workers, ranks: progress and global ranks, by local rank."""
    return [WorkerProgress(local_rank, ranks[local_rank], row) for local_rank, row in enumerate(workers) if row.pid]


def share_every_s(nodes: int) -> float:
    """Return the mean time between two writes of an agent, in a job of this many nodes."""
    return max(SHARE_S, nodes / WRITES_PER_S)


@dataclass(frozen=True)
class _KnownGoodput:
    """The job's sum as it was shared, and how much of it is this agent's: what this agent has spent since adds to it."""

    shared: Shared = field(default_factory=Shared)
    mine: Spent = field(default_factory=Spent)

    def at(self, mine: Spent) -> Shared:
        """Return the sum when this agent has spent so much."""
        return Shared(self.shared.spent.plus(mine.since(self.mine)), max(1, self.shared.hosts))

    def after(self, shared: Shared, mine: Spent) -> _KnownGoodput:
        """Return what is known after a sum was read. The agent of rank 0 may have made it before this one gave its share: then
        what was known is more, and a goodput that is shown must not go back.
        """
        if shared.spent.total_s >= self.at(mine).spent.total_s - ROUNDING_S:
            return _KnownGoodput(shared, mine)
        return replace(self, shared=replace(self.shared, hosts=shared.hosts))


class Goodput:
    """This agent's ledger, and the thread that shares it. Any thread may call `look` and `job`, the main thread the others."""

    def __init__(self) -> None:
        # Re-entrant: a signal handler may interrupt the thread that holds the lock.
        self._lock = threading.RLock()
        self._ledger = TimeLedger(time.monotonic())
        self._table: ProgressTable | None = None
        self._share: Callable[[Spent], Shared] | None = None
        self._given, self._known = Spent(), _KnownGoodput()
        self._changed, self._first = threading.Event(), threading.Event()
        self._ended = self._closed = False
        self._thread: threading.Thread | None = None
        self._nodes = 1

    def enter(self, state: str) -> None:
        """Note what the agent does from now on. state: one of families.STATES."""
        with self._lock:
            workers = self._workers()  # before the clock is read: no worker can then have settled more
            self._ledger.enter(state, time.monotonic(), workers)
        # Some agents share now, so that an agent that is new in the next round learns how far this one has come.
        if state == "stop" and random.random() < AT_ROUNDS_END / self._nodes:
            self._changed.set()

    def decided(self, kind: str) -> None:
        """Note the kind of the job's verdict on the last round."""
        with self._lock:
            self._ledger.decide(hung=kind == kinds.HANG)

    def round_begins(self, table: ProgressTable | None, step: int | None, nodes: int) -> None:
        """Show the workers of the next round, before they start, which of their steps are not new.

        table: None if they report no progress. step: that they resume from; None if unknown. nodes: of the round.
        """
        self._nodes = nodes
        if self._share is not None and self._thread is None:
            # Not before: the first node of a job deletes what an ended one left under its run id.
            thread = threading.Thread(target=self._share_often, name="elastic_ext-goodput", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:  # a limit on threads
                logger.warning("goodput is not shared with the job: %s", error)
                self._share = None
        if self._thread is not None:
            self._first.wait(FIRST_SHARE_S)
            self._first.set()  # only the first round waits
        with self._lock:
            self._table = table
            repeated = self._ledger.resume(step)
        if table is not None:
            table.repeat(repeated)

    def _workers(self) -> Sequence[Progress]:
        return self._table.read_all() if self._table is not None else ()

    # What others see.

    def look(self) -> Look:
        with self._lock:
            workers = self._workers()
            return self._ledger.at(time.monotonic(), workers)

    def job(self) -> Shared:
        """Return where the time of the job went, as far as this agent knows: earlier agents and other hosts as last shared."""
        mine = self.look().spent
        with self._lock:
            return self._known.at(mine)

    def share_with(self, share: Callable[[Spent], Shared]) -> None:
        """Share from the first round on. share: adds what was spent since its last call; returns the sum of the job."""
        self._share = share

    def end(self) -> None:
        """Share for the last time. Returns at once."""
        self.enter(families.ENDED)
        self._ended = True
        self._changed.set()

    def close(self, limit_s: float) -> None:
        """The same, and wait for it; say where the time went. A second call does nothing. limit_s: for a write under way."""
        if self._closed:
            return
        self.end()
        if self._thread is not None:
            self._thread.join(limit_s)
        self._closed = True  # not before: if a signal ends the wait, the next call does the rest
        job = self.job()
        logger.info("%s (%d hosts, %.0f s)", goodput.summary(job.spent), job.hosts, job.spent.total_s)

    def _share_often(self) -> None:
        failed = False
        while True:
            self._changed.clear()
            ended = self._ended  # after that: `end` sets both
            try:
                self._share_once()
                failed = False
            except (ElasticExtError, OSError) as error:
                logger.log(logging.DEBUG if failed else logging.INFO, "goodput was not shared, and will be later: %s", error)
                failed = True
            except Exception:  # the top of a thread
                logger.exception("goodput is no longer shared with the job")
                return
            finally:
                self._first.set()
            if ended:
                return
            self._changed.wait(share_every_s(self._nodes) * random.uniform(0.5, 1.5))

    def _share_once(self) -> None:
        assert self._share is not None
        mine = self.look().spent
        shared = self._share(mine.since(self._given))
        with self._lock:
            self._given, self._known = mine, self._known.after(shared, mine)
            self._ledger.learn(shared.spent)


class AccountedMetrics(AgentMetrics):
    """The agent's metrics, with its goodput, which every change of state concerns."""

    @functools.cached_property
    def goodput(self) -> Goodput:
        """Where the time goes. Made by the constructor of AgentMetrics, which enters a state."""
        return Goodput()

    on_copied: Callable[[int | None], object] = staticmethod(lambda lag_steps: None)
    """Called when a checkpoint has become complete in checkpoint_dir, by the copier's thread; see `copied`."""

    def enter(self, state: str) -> None:
        self.goodput.enter(state)
        super().enter(state)

    def copied(self, size: int, lag_steps: int | None, lag_s: float, complete: bool, failed: bool) -> None:
        super().copied(size, lag_steps, lag_s, complete, failed)
        if complete:
            self.on_copied(lag_steps)

    def failed(self, kind: str) -> None:
        self.goodput.decided(kind)
        super().failed(kind)

    def status(self) -> dict[str, object]:
        return {**super().status(), "goodput": goodput_status(self.goodput.look(), self.goodput.job())}


def make_metrics(
    settings: Settings, run_id: str, workers: int, progress: Callable[[], Sequence[WorkerProgress]]
) -> AccountedMetrics:
    """Return this agent's metrics. workers: on this node. progress: see AgentMetrics."""
    metrics = AccountedMetrics(
        version=elastic_ext.__version__,
        torch=torch.__version__,
        run_id=run_id,
        node=host_name(settings),
        cold_reasons=[each.value for each in ColdReason],
        gpus=GpuQuery(lambda: gpus_by_local_rank(workers, gpu_uuids(), os.environ)).answer,
        progress=progress,
    )
    metrics.registry.register(GoodputCollector(metrics.goodput.look, metrics.goodput.job))
    return metrics
