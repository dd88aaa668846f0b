"""What gets an agent's events and recoveries. Only where the user has asked for them are `output` and `spans` imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Protocol

from elastic_ext.events import otel
from elastic_ext.events.event_table import PastRecovery, Source, Value


class EventReceiver(Protocol):
    def emit(self, name: str, **fields: Value) -> None:
        """Write an event with its own fields; see `events.schema.json`. Returns at once. Any thread may call this."""

    def close(self, limit_s: float) -> None:
        """Write what waits, for limit_s seconds at most; later events are not written."""


class RecoveryReceiver(Protocol):
    def recovered(self, recovery: PastRecovery) -> None:
        """Send a recovery. Returns at once."""

    def close(self, limit_s: float) -> None:
        """Send what waits, for limit_s seconds at most."""


class NoReceiver:
    """Gets events and recoveries that the user has not asked for."""

    def emit(self, name: str, **fields: Value) -> None:
        """Do nothing."""

    def recovered(self, recovery: PastRecovery) -> None:
        """Do nothing."""

    def close(self, limit_s: float) -> None:
        """Do nothing."""


def of_events(path: str | None, source: Source, round_: Callable[[], int]) -> EventReceiver:
    """Return what gets the agent's events. path: the setting events_file. round_: returns the number of the current round."""
    if path is None:
        return NoReceiver()
    from elastic_ext.events.output import Events

    return Events(path, source, round_)


def of_recoveries(version: str, source: Source) -> RecoveryReceiver:
    """Return what gets the agent's recoveries as spans."""
    asked = bool(otel.exporters(os.environ, otel.TRACES))
    if not asked and "opentelemetry.trace" not in sys.modules:  # a program that has made a provider of its own has imported it
        return NoReceiver()
    from elastic_ext.events.spans import Spans

    return Spans(version, source, asked)
