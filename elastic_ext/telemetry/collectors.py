"""Metrics of what an agent learns from others: verdicts, hangs and stragglers of the job, calls of etcd."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic_ext.base.diagnosis import KINDS
from elastic_ext.base.printable import shown
from elastic_ext.telemetry import families
from elastic_ext.telemetry.families import DECISIONS, FAILED, OK, OTHER, FamilyCollector, UnixClock, Values

REPLACE = "replace_node"


class VerdictMetrics(FamilyCollector):
    """Incidents of the job that this agent knows of: hangs, verdicts, strikes against this node, refused hosts.

    The agents of a job do not read its ledger. So the strikes are those of this agent's time, and a node that a verdict does not
    reach (its own workers had not failed, and the next round began at once) may not count it.
    """

    table = families.VERDICTS

    def __init__(self, host: str, refuse_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """host: this node's, as verdicts name it. refuse_s: how long a verdict refuses a host, in seconds. now: the clock."""
        super().__init__()
        self._host, self._refuse_s, self._now = host, refuse_s, now
        self._refused: dict[str, float] = {}  # by host: when that ends
        self._last: tuple[int, str, str] | None = None

    def hung(self) -> None:
        self._add("hangs")

    def decided(self, round_: int, decision: str, kind: str, host: str) -> None:
        """Count a verdict once, however often it is reported.

        round_: the round that it ended. decision: one of families.DECISIONS; another one counts as a stop. kind: the kind of the
        failure; it may come from a newer agent. host: that of the cause.
        """
        with self._lock:
            if self._last == (round_, decision, host):
                return
            self._last = (round_, decision, host)
            self._add("decisions", decision if decision in DECISIONS else DECISIONS[0], kind if kind in KINDS else OTHER)
            self._add("node_strikes", by=int(host == self._host))
            if decision == REPLACE:
                self._refused[host] = self._now() + self._refuse_s

    def values(self) -> Values:
        with self._lock:
            now = self._now()
            self._refused = {host: until for host, until in self._refused.items() if until > now}
            self._set(refused_nodes=len(self._refused))
        yield from super().values()


class LatenessMetrics(FamilyCollector):
    """The ranks and hosts of the job that are late."""

    table = families.LATENESS

    def show(self, named: Iterable[tuple[str, int, float, float]], largest: float | None) -> None:
        """Show these and no others.

        named: host, rank (-1: the whole host), seconds and share of a step of each. largest: share of the latest, named or not;
        None if unknown.
        """
        found = {(shown(host), str(rank) if rank >= 0 else ""): (late_s, share) for host, rank, late_s, share in named}
        with self._lock:
            self._set(lateness_largest_ratio=largest)
            self._values["elastic_ext_straggler_seconds"] = {labels: late_s for labels, (late_s, _) in found.items()}
            self._values["elastic_ext_straggler_ratio"] = {labels: share for labels, (_, share) in found.items()}


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
        super().__init__()
        self.lease_until: Callable[[], float | None] = lambda: None  # until when etcd certainly keeps this node; monotonic
        self._outages, self._on_outage = OutageWatch(outage_s), on_outage
        self._clock = UnixClock()

    def called(self, seconds: float, answered: bool, endpoint: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._observe("etcd_call_seconds", seconds=seconds)
            self._add("etcd_calls", OK if answered else FAILED)
            outage = self._outages.called(now - seconds, now, answered, endpoint)
            if outage is not None:
                self._on_outage(outage)  # under the lock: its end must not be reported before it

    def reconnected(self) -> None:
        self._add("etcd_reconnects")

    def values(self) -> Values:
        yield from super().values()
        until = self.lease_until()
        yield "elastic_ext_etcd_lease_expiry_timestamp_seconds", (), self._clock.at(until) if until is not None else None
