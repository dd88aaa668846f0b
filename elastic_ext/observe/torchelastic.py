"""Passes the values of torchelastic's put_metric to our metrics, in addition to the handler that the user configured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

GROUP = "torchelastic"
_UNCONFIGURED = "elastic_ext: a group that nobody configures"


class Sink(Protocol):
    """The receiver of the values."""

    def put(self, group: str, name: str, value: float) -> None: ...


class _MetricData(Protocol):
    """The part of torch's MetricData that this module uses."""

    group_name: str
    name: str
    value: float


class _Handler(Protocol):
    """Torch's MetricHandler."""

    def emit(self, metric_data: _MetricData) -> None: ...


class _Default:
    """A stand-in for "no handler for this group". It passes values to the current default handler.

    torch.distributed.elastic.metrics has no public way to remove a group's handler.
    """

    def emit(self, metric_data: _MetricData) -> None:
        from torch.distributed.elastic.metrics import getStream

        getStream(_UNCONFIGURED).handler.emit(metric_data)


class _Tee:
    """A handler that feeds `sink` unless that is None, and always feeds `before`, whose errors reach the caller."""

    def __init__(self, sink: Sink, before: _Handler) -> None:
        self.sink: Sink | None = sink
        self.before = before

    def emit(self, metric_data: _MetricData) -> None:
        sink = self.sink
        if sink is not None:
            sink.put(metric_data.group_name, metric_data.name, metric_data.value)
        self.before.emit(metric_data)


@contextmanager
def bridge_torchelastic(sink: Sink) -> Iterator[None]:
    """Inside this context, pass values of put_metric to `sink` and to the handler that was configured before.

    The end restores that handler, unless another one was configured in the meantime, which then stays. Bridges of several agents
    in one process may end in any order.
    """
    from torch.distributed.elastic.metrics import configure, getStream

    before: _Handler = getStream(GROUP).handler
    if before is getStream(_UNCONFIGURED).handler:
        before = _Default()
    tee = _Tee(sink, before)
    configure(tee, GROUP)
    try:
        yield
    finally:
        tee.sink = None
        current: _Handler = getStream(GROUP).handler
        if isinstance(current, _Tee):
            # Remove ended bridges from the top. One below an open bridge stays, and passes values through.
            while isinstance(current, _Tee) and current.sink is None:
                current = current.before
            configure(current, GROUP)
