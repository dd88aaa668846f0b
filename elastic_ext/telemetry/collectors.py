"""Metrics of what an agent learns from others: verdicts and hangs of the job, calls of etcd, the goodput of all hosts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic_ext.base.goodput import Shared
from elastic_ext.base.kinds import KINDS
from elastic_ext.base.printable import shown
from elastic_ext.telemetry import families
from elastic_ext.telemetry.agent_metrics import UnixClock
from elastic_ext.telemetry.families import DECISIONS, FAILED, OK, OTHER, FamilyCollector, HistogramCounts, Labels, Values
from elastic_ext.telemetry.goodput import Look, advised_interval

REPLACE = "replace_node"
# Seconds. On a local network etcd answers a read in 1 ms and a write, which it syncs to disk, in 2 to 10; a call has 5 s.
CALL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class VerdictMetrics(FamilyCollector):
    """Incidents of the job that this agent knows of: hangs, verdicts, strikes against this node, refused hosts.

    The agents of a job do not read its ledger. So the strikes are those of this agent's time, and a node that a verdict does not
    reach (its own workers had not failed, and the next round began at once) may not count it.
    """

    table = families.VERDICTS

    def __init__(self, host: str, refuse_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """host: this node's, as verdicts name it. refuse_s: how long a verdict refuses a host, in seconds. now: the clock."""
        self._host, self._refuse_s, self._now = host, refuse_s, now
        self._lock = threading.Lock()
        self._counts: dict[str, dict[Labels, float]] = {
            name: dict.fromkeys(family.known, 0.0) for name, family in self.table.items()
        }
        self._refused: dict[str, float] = {}  # by host: when that ends
        self._last: tuple[int, str, str] | None = None

    def hung(self) -> None:
        with self._lock:
            self._counts["elastic_ext_hangs"][()] += 1

    def decided(self, round_: int, decision: str, kind: str, host: str) -> None:
        """Count a verdict once, however often it is reported.

        round_: the round that it ended. decision: one of families.DECISIONS; another one counts as a stop. kind: the kind of the
        failure; it may come from a newer agent. host: that of the cause.
        """
        with self._lock:
            if self._last == (round_, decision, host):
                return
            self._last = (round_, decision, host)
            labels = decision if decision in DECISIONS else DECISIONS[0], kind if kind in KINDS else OTHER
            self._counts["elastic_ext_decisions"][labels] += 1
            self._counts["elastic_ext_node_strikes"][()] += host == self._host
            if decision == REPLACE:
                self._refused[host] = self._now() + self._refuse_s

    def values(self) -> Values:
        with self._lock:
            now = self._now()
            self._refused = {host: until for host, until in self._refused.items() if until > now}
            self._counts["elastic_ext_refused_nodes"][()] = len(self._refused)
            found = [(name, labels, value) for name, counts in self._counts.items() for labels, value in counts.items()]
        yield from found


class LatenessMetrics(FamilyCollector):
    """The ranks and hosts of the job that are late. Any thread may call any method."""

    table = families.LATENESS

    def __init__(self) -> None:
        self._found: list[tuple[str, Labels, float | None]] = []  # replaced, never changed

    def show(self, named: Iterable[tuple[str, int, float, float]], largest: float | None) -> None:
        """Show these and no others.

        named: host, rank (-1: the whole host), seconds and share of a step of each. largest: share of the latest, named or not;
        None if unknown.
        """
        found: list[tuple[str, Labels, float | None]] = [("elastic_ext_lateness_largest_ratio", (), largest)]
        for host, rank, late_s, share in named:
            labels = shown(host), str(rank) if rank >= 0 else ""
            found += [("elastic_ext_straggler_seconds", labels, late_s), ("elastic_ext_straggler_ratio", labels, share)]
        self._found = found

    def values(self) -> Values:
        yield from self._found


@dataclass(frozen=True)
class OutageChange:
    """A change. over: etcd serves again. endpoint: asked last, or that answers again. seconds: how long without an answer."""

    over: bool
    endpoint: str
    seconds: float


class OutageWatch:
    """Reports an outage of etcd once it has lasted: the restart of a member does not count. Pure; times are monotonic seconds."""

    def __init__(self, after_s: float) -> None:
        """after_s: from the first failed call after the last answer."""
        self._after_s = after_s
        self._answered_at = float("-inf")
        self._since: float | None = None  # since when calls have failed
        self._reported = False

    def called(self, began: float, now: float, answered: bool, endpoint: str) -> OutageChange | None:
        """Note a call that began then and ends now; return what has changed by that."""
        if not answered:
            if self._since is None:
                self._since = max(began, self._answered_at)  # a call that failed late began before the last answer
            if self._reported or now - self._since < self._after_s:
                return None
            self._reported = True
            return OutageChange(False, endpoint, now - self._since)
        since, reported = self._since, self._reported
        self._since, self._reported, self._answered_at = None, False, now
        return OutageChange(True, endpoint, now - since) if reported and since is not None else None


class EtcdHealth(FamilyCollector):
    """How etcd serves this agent: an observer of the client's calls (`etcd.calls.CallObserver`). It never calls etcd itself."""

    table = families.ETCD

    def __init__(self, outage_s: float = math.inf, on_outage: Callable[[OutageChange], None] = lambda outage: None) -> None:
        """outage_s: how long an outage lasts before on_outage is called, and again at its end, on the thread of a call."""
        self.lease_until: Callable[[], float | None] = lambda: None  # until when etcd certainly keeps this node; monotonic
        self._outages, self._on_outage = OutageWatch(outage_s), on_outage
        self._clock = UnixClock()
        self._lock = threading.Lock()
        self._calls = HistogramCounts(CALL_BUCKETS)
        self._outcomes = {OK: 0, FAILED: 0}
        self._reconnects = 0

    def called(self, seconds: float, answered: bool, endpoint: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._calls.observe(seconds)
            self._outcomes[OK if answered else FAILED] += 1
            outage = self._outages.called(now - seconds, now, answered, endpoint)
            if outage is not None:
                self._on_outage(outage)  # under the lock: its end must not be reported before it

    def reconnected(self) -> None:
        with self._lock:
            self._reconnects += 1

    def values(self) -> Values:
        with self._lock:
            calls, outcomes, reconnects = self._calls.copy(), dict(self._outcomes), self._reconnects
        yield "elastic_ext_etcd_call_seconds", (), calls
        for outcome, count in outcomes.items():
            yield "elastic_ext_etcd_calls", (outcome,), count
        yield "elastic_ext_etcd_reconnects", (), reconnects
        until = self.lease_until()
        yield "elastic_ext_etcd_lease_expiry_timestamp_seconds", (), self._clock.at(until) if until is not None else None


class GoodputCollector(FamilyCollector):
    """Goodput. look: of this agent. job: of all agents, as far as known."""

    table = families.GOODPUT

    def __init__(self, look: Callable[[], Look], job: Callable[[], Shared]) -> None:
        self._look, self._job = look, job

    def values(self) -> Values:
        look, job = self._look(), self._job()
        interval = advised_interval(job.spent, job.hosts)
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


def goodput_status(look: Look, job: Shared) -> dict[str, object]:
    """Return what /status.json shows under "goodput"."""
    interval = advised_interval(job.spent, job.hosts)
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
