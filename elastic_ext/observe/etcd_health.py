"""How etcd serves this agent. It hears of each call and never asks etcd for anything itself."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic_ext.observe.etcd_outage import Outage, OutageWatch
from elastic_ext.observe.families import ETCD, ETCD_CALL, ETCD_CALLS, ETCD_LEASE, ETCD_RECONNECTS, FAILED, OK
from elastic_ext.observe.metrics import Histogram, UnixClock

# Seconds. On a local network etcd answers a read in 1 ms and a write, which it syncs to disk, in 2 to 10; a call has 5 s.
CALL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class EtcdHealth(Collector):
    """An observer of the etcd client (`etcd.observer.CallObserver`). Any thread may call any method.

    Attributes:
        lease_until: until when etcd certainly keeps this node; monotonic.
    """

    def __init__(self, outage_s: float = math.inf, on_outage: Callable[[Outage], None] = lambda outage: None) -> None:
        """
        Args:
            outage_s: for how long calls have to fail before that is an outage.
            on_outage: called once it has lasted so long, and at its end, on the thread of a call.
        """
        self.lease_until: Callable[[], float | None] = lambda: None
        self._outages, self._on_outage = OutageWatch(outage_s), on_outage
        self._clock = UnixClock()
        self._lock = threading.Lock()
        self._calls = Histogram(CALL_BUCKETS)
        self._outcomes = {OK: 0, FAILED: 0}
        self._reconnects = 0

    def called(self, seconds: float, answered: bool, endpoint: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._calls.observe(seconds)
            self._outcomes[OK if answered else FAILED] += 1
            outage = self._outages.called(now - seconds, now, answered, endpoint)
            if outage is not None:
                self._on_outage(outage)  # under the lock: the end of an outage is not told before it

    def reconnected(self) -> None:
        with self._lock:
            self._reconnects += 1

    def describe(self) -> Iterator[Metric]:
        """Yield the families without values."""
        return (family.new(name) for name, family in ETCD.items())

    def collect(self) -> Iterator[Metric]:
        """Yield the families with their values."""
        with self._lock:
            buckets, total, outcomes, reconnects = self._calls.buckets(), self._calls.sum, dict(self._outcomes), self._reconnects
        until = self.lease_until()
        found = {name: family.new(name) for name, family in ETCD.items()}
        cast("HistogramMetricFamily", found[ETCD_CALL]).add_metric((), buckets, total)
        for outcome, count in outcomes.items():
            cast("CounterMetricFamily", found[ETCD_CALLS]).add_metric((outcome,), count)
        cast("CounterMetricFamily", found[ETCD_RECONNECTS]).add_metric((), reconnects)
        if until is not None:
            cast("GaugeMetricFamily", found[ETCD_LEASE]).add_metric((), self._clock.at(until))
        yield from found.values()
