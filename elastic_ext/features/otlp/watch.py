"""The agent's metrics through OpenTelemetry, where its standard variables ask for them."""

from __future__ import annotations

import os

import elastic_ext
from elastic_ext.agent.feature import Feature, JobParts
from elastic_ext.base import threads
from elastic_ext.events.event_table import Source
from elastic_ext.rendezvous.address import own_name
from elastic_ext.telemetry import otlp


class MetricsPushed(Feature):
    def __init__(self, parts: JobParts) -> None:
        super().__init__(parts)
        source = Source(parts.job.get_run_id(), own_name(parts.settings), os.getpid())
        self._exports = otlp.exports(parts.metrics.registry, elastic_ext.__version__, source)

    def close(self) -> None:
        """Send the last values. It shares the time of all who report the agent's end."""
        with threads.held() as received:
            self._exports.close(self.parts.journal.end_limit.left_s())
        threads.raise_again(received)
