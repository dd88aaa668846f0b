"""The agent's last metrics in a file, for the textfile collector of Prometheus' node exporter.

An agent ends at the verdict, mostly before the next scrape. What it counted last would be lost, and that is the failure itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from prometheus_client.exposition import write_to_textfile
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

logger = logging.getLogger(__name__)

NOT_OURS = "process_"  # the node exporter has its own, and refuses a file with the same


class _Labelled(Collector):
    """Families of another registry, each sample with more labels. The node exporter refuses files that repeat a series."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            if not family.name.startswith(NOT_OURS):
                family.samples = [each._replace(labels={**self._labels, **each.labels}) for each in family.samples]
                yield family

    def describe(self) -> Iterable[Metric]:
        return ()


def write(path: str, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
    """Write the metrics, whole or not at all; a failure is logged.

    path: ends with .prom, in the collector's directory. labels: added to each sample; they tell agents of one host apart.
    """
    whole = CollectorRegistry()
    whole.register(_Labelled(registry, labels))
    try:
        write_to_textfile(path, whole)
    except Exception as error:  # noqa: BLE001 - a collector may raise anything, and the result of the job matters more
        logger.warning("metrics: cannot write metrics_file=%s: %s", path, error)
