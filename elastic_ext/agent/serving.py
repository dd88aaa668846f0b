"""Serves an agent's pages, from its start to the last scrape."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from elastic_ext.base.settings import Settings
from elastic_ext.base.wakeup import Wakeup
from elastic_ext.observe import gate, prometheus_files
from elastic_ext.observe.gate import Gate
from elastic_ext.observe.pages import LastScrape, Pages
from elastic_ext.observe.server import MetricsServer


def check(settings: Settings) -> None:
    """Raise UsageError if the server could not do what the settings demand."""
    if settings.metrics and settings.metrics_web_config is not None:
        gate.load(settings.metrics_web_config)


class Serving:
    """The server of one agent, and the file by which Prometheus finds it.

    Attributes:
        url: address of the metrics; None if they are not served.
        lingers: whether `close` waits for a last scrape.
    """

    def __init__(self, shown: Pages, settings: Settings, labels: Mapping[str, str], wakeup: Wakeup) -> None:
        """labels: of the target for Prometheus. wakeup: signals wake it."""
        self._linger_s, self._wakeup = settings.metrics_linger, wakeup
        self._last_scrape = LastScrape()
        self._unannounce: Callable[[], None] = lambda: None
        self.lingers = False
        # The user must see a port that nobody chose, and torchrun shows only warnings.
        announce = logging.WARNING if settings.metrics_port == 0 else logging.INFO
        guard = Gate(settings.metrics_web_config) if settings.metrics_web_config is not None else None
        self._server = MetricsServer(
            self._last_scrape.noting(shown), settings.metrics_host, settings.metrics_port, announce, guard
        )
        self.url = self._server.url
        if settings.metrics_discovery_dir is not None and self._server.endpoint is not None:
            all_labels = {**labels, **({"__scheme__": "https"} if guard is not None and guard.tls else {})}
            self._unannounce = prometheus_files.announce(settings.metrics_discovery_dir, self._server.endpoint, all_labels)

    def ended(self) -> None:
        """Note that what is served from now on is the last."""
        self._last_scrape.ended_at = time.monotonic()

    def close(self) -> Sequence[int]:
        """Serve no more, if need be after a last scrape. Return the signals that came meanwhile; they have done nothing."""
        try:
            return self._last_scrape.wait(self._linger_s, self._wakeup) if self.lingers else ()
        finally:
            self._unannounce()
            self._server.close()
