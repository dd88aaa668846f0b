"""What has befallen the job, as this agent has learned of it: hangs, verdicts, strikes against this node, refused hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic_ext.base.kinds import KINDS
from elastic_ext.observe.families import DECISIONS, INCIDENTS, OTHER, Labels

REPLACE = "replace_node"


class Incidents(Collector):
    """Any thread may call any method.

    The agents of a job do not read its ledger. So the strikes are those of this agent's time, and a node that a verdict does not
    reach (its own workers had not failed, and the next round began at once) may not count it.
    """

    def __init__(self, host: str, refuse_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """host: this node's, as verdicts name it. refuse_s: how long a verdict refuses a host, in seconds. now: the clock."""
        self._host, self._refuse_s, self._now = host, refuse_s, now
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {
            name: dict.fromkeys(family.known, 0.0) for name, family in INCIDENTS.items()
        }
        self._refused: dict[str, float] = {}  # by host: when that ends
        self._last: tuple[int, str, str] | None = None

    def hung(self) -> None:
        """Count a hang of the job."""
        with self._lock:
            self._values["elastic_ext_hangs"][()] += 1

    def decided(self, round_: int, decision: str, kind: str, host: str) -> None:
        """Count a verdict, once, however often this agent is told of it.

        Args:
            round_: the round that it ended.
            decision: one of families.DECISIONS; another one counts as a stop.
            kind: the kind of the failure; it may come from a newer agent.
            host: that of the cause.
        """
        with self._lock:
            if self._last == (round_, decision, host):
                return
            self._last = (round_, decision, host)
            labels = decision if decision in DECISIONS else DECISIONS[0], kind if kind in KINDS else OTHER
            self._values["elastic_ext_decisions"][labels] += 1
            self._values["elastic_ext_node_strikes"][()] += host == self._host
            if decision == REPLACE:
                self._refused[host] = self._now() + self._refuse_s

    def describe(self) -> Iterator[Metric]:
        """Yield the families without values."""
        return (family.new(name) for name, family in INCIDENTS.items())

    def collect(self) -> Iterator[Metric]:
        """Yield the families with their values."""
        with self._lock:
            now = self._now()
            self._refused = {host: until for host, until in self._refused.items() if until > now}
            self._values["elastic_ext_refused_nodes"][()] = len(self._refused)
            values = {name: dict(by_labels) for name, by_labels in self._values.items()}
        for name, by_labels in values.items():
            family = INCIDENTS[name].new(name)
            for labels, value in by_labels.items():
                cast("CounterMetricFamily", family).add_metric(labels, value)
            yield family
