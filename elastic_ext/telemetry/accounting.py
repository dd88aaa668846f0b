"""This agent's goodput: a ledger of what the agent and its workers do, shared with the job, as metrics and status show it."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from elastic_ext.base import diagnosis, errors, threads
from elastic_ext.base.goodput import Shared, Spent, summary
from elastic_ext.telemetry import families, goodput
from elastic_ext.workers.progress import Progress, ProgressTable

logger = logging.getLogger(__name__)

SHARE_S = 10.0  # mean time between two writes to etcd or a file; a killed agent loses one and a half times that at most
WRITES_PER_S = 10.0  # of all agents of a job together
AT_ROUNDS_END = 10  # about this many agents write at once: all nodes write other records then, and a recovery waits for those
ROUNDING_S = 1e-3  # of a sum
FIRST_SHARE_S = 2.0  # how long the first round waits for what earlier agents of this job have reached


def share_every_s(nodes: int) -> float:
    return max(SHARE_S, nodes / WRITES_PER_S)


@dataclass(frozen=True)
class _KnownGoodput:
    """The job's sum as it was shared, and how much of it is this agent's: what this agent has spent since adds to it."""

    shared: Shared = field(default_factory=Shared)
    mine: Spent = field(default_factory=Spent)

    def at(self, mine: Spent) -> Shared:
        return Shared(self.shared.spent.plus(mine.since(self.mine)), max(1, self.shared.hosts))

    def after(self, shared: Shared, mine: Spent) -> _KnownGoodput:
        """Return what is known after a sum was read. The agent of rank 0 may have made it before this one gave its share: then
        what was known is more, and a goodput that is shown must not go back.
        """
        if shared.spent.total_s >= self.at(mine).spent.total_s - ROUNDING_S:
            return _KnownGoodput(shared, mine)
        return replace(self, shared=replace(self.shared, hosts=shared.hosts))


class Goodput(families.FamilyCollector):
    """This agent's ledger, and the thread that shares it.

    Any thread may call `look`, `job`, `values` and `status`, the main thread the others.
    """

    table = families.GOODPUT

    def __init__(self) -> None:
        super().__init__()
        self._ledger = goodput.TimeLedger(time.monotonic())
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
        with self._lock:
            self._ledger.decide(hung=kind == diagnosis.HANG)

    def round_begins(self, table: ProgressTable | None, step: int | None, nodes: int) -> None:
        """Show the workers of the next round, before they start, which of their steps are not new.

        table: None if they report no progress. step: that they resume from; None if unknown. nodes: of the round.
        """
        self._nodes = nodes
        if self._share is not None and self._thread is None:
            # Not before: the first node of a job deletes what an ended one left under its run id.
            text = "goodput is not shared with the job: %s"
            self._thread = threads.started(self._share_often, "elastic_ext-goodput", logger.warning, text)
            if self._thread is None:
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

    def look(self) -> goodput.Look:
        with self._lock:
            workers = self._workers()
            return self._ledger.at(time.monotonic(), workers)

    def job(self) -> Shared:
        """Return where the time of the job went, as far as this agent knows: earlier agents and other hosts as last shared."""
        mine = self.look().spent
        with self._lock:
            return self._known.at(mine)

    def values(self) -> families.Values:
        look, job = self.look(), self.job()
        interval = goodput.advised_interval(job.spent, job.hosts)
        for state, seconds in look.spent.by_state.items():
            yield "elastic_ext_goodput_seconds", (state,), seconds
        single = {
            "goodput_unsettled_seconds": look.unsettled_s,
            "goodput_ratio": job.spent.ratio,
            "effective_training_time_ratio": job.spent.effective_ratio,
            "tokens": look.tokens,
            "floating_point_operations": look.flops,
            "checkpoint_interval_advised_seconds": interval.seconds,
        }
        if interval.seconds is not None:
            single |= {
                "checkpoint_stall_mean_seconds": interval.stall_s,
                "restart_mean_seconds": interval.restart_s,
                "interruption_interval_mean_seconds": interval.between_s,
            }
        for name, value in single.items():
            yield f"elastic_ext_{name}", (), value

    def status(self) -> dict[str, object]:
        """Return what /status.json shows under "goodput"."""
        look, job = self.look(), self.job()
        interval = goodput.advised_interval(job.spent, job.hosts)
        return {
            "seconds": look.spent.by_state,
            "unsettled_seconds": look.unsettled_s,
            "job": {
                "hosts": job.hosts,
                "seconds": job.spent.by_state,
                "ratio": job.spent.ratio,
                "effective_ratio": job.spent.effective_ratio,
                "interruptions": job.spent.interruptions,
                "checkpoint_interval_advised_seconds": interval.seconds,
                "checkpoint_interval_reason": interval.reason,
            },
        }

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
        logger.info("%s (%d hosts, %.0f s)", summary(job.spent), job.hosts, job.spent.total_s)

    def _share_often(self) -> None:
        failed = False
        while True:
            self._changed.clear()
            ended = self._ended  # after that: `end` sets both
            try:
                self._share_once()
                failed = False
            except (errors.ElasticExtError, OSError) as error:
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
