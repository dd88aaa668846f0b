"""The goodput of an agent and of its job as metrics and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic_ext.base.goodput import Shared
from elastic_ext.observe.families import GOODPUT
from elastic_ext.observe.goodput import Look, advised_interval


class GoodputCollector(Collector):
    """Shows the ledger in the registry in which it is registered. look: of this agent. job: of all agents, as far as known."""

    def __init__(self, look: Callable[[], Look], job: Callable[[], Shared]) -> None:
        self._look, self._job = look, job

    def describe(self) -> Iterator[Metric]:
        """Yield the families without values."""
        for name, family in GOODPUT.items():
            yield family.new(name)

    def collect(self) -> Iterator[Metric]:
        """Yield the families with their values; called at each scrape, in the scrape's thread."""
        look, job = self._look(), self._job()
        spent = job.spent
        found = {name: family.new(name) for name, family in GOODPUT.items()}

        def add(name: str, value: float | None, *labels: str) -> None:
            if value is not None:
                cast("CounterMetricFamily", found[f"elastic_ext_{name}"]).add_metric(labels, value)

        for state, seconds in look.spent.by_state.items():
            add("goodput_seconds", seconds, state)
        add("goodput_unsettled_seconds", look.unsettled_s)
        add("goodput_ratio", spent.ratio)
        add("effective_training_time_ratio", spent.effective_ratio)
        add("tokens", look.tokens)
        add("floating_point_operations", look.flops)
        interval = advised_interval(spent, job.hosts)
        add("checkpoint_interval_advised_seconds", interval.seconds)
        if interval.seconds is not None:
            add("checkpoint_stall_mean_seconds", interval.stall_s)
            add("restart_mean_seconds", interval.restart_s)
            add("interruption_interval_mean_seconds", interval.between_s)
        yield from found.values()


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
