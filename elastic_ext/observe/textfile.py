"""The agent's last metrics in a file, for the textfile collector of Prometheus' node exporter.

An agent ends at the verdict, mostly before the next scrape. What it counted last would be lost, and that is the failure itself.
"""

from __future__ import annotations

import logging
import threading
import time
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


class TextFile:
    """Writes the file in a thread, for a file server that hangs must not hold up the end of an agent.

    For one thread: `begin`, then `wait`, and the same again if there is more.
    """

    def __init__(self, path: str, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        """See `write`."""
        self._path, self._registry, self._labels = path, registry, labels
        self._thread: threading.Thread | None = None
        self._again = self._told = False

    def begin(self) -> None:
        """Begin to write what the metrics are now. Returns at once."""
        if self._thread is not None and self._thread.is_alive():
            self._again = True  # beside a write that hangs, another would, too
            return
        self._again = False
        thread = threading.Thread(
            target=write, args=(self._path, self._registry, self._labels), name="elastic_ext-textfile", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # a limit on threads
            logger.warning("metrics: cannot write metrics_file=%s: %s", self._path, error)
        else:
            self._thread = thread

    def wait(self, limit_s: float) -> None:
        """Wait until it is written, for limit_s seconds at most; log once if it is not."""
        by = time.monotonic() + limit_s
        while self._thread is not None:
            self._thread.join(max(0.0, by - time.monotonic()))
            if self._thread.is_alive():
                if not self._told:
                    logger.warning("metrics: metrics_file=%s does not take the last metrics within %.1f s", self._path, limit_s)
                self._told = True
                return
            if not self._again:
                return
            self.begin()
