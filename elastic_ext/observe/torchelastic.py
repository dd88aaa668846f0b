"""Passes the values of torchelastic's put_metric on to our metrics, besides the handler that the user has configured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

GROUP = "torchelastic"
_UNCONFIGURED = "elastic_ext: a group that nobody configures"


class Sink(Protocol):
    """Takes the values."""

    def put(self, group: str, name: str, value: float) -> None: ...


class _MetricData(Protocol):
    """The part of torch's MetricData that is used here."""

    group_name: str
    name: str
    value: float


class _Handler(Protocol):
    """Torch's MetricHandler."""

    def emit(self, metric_data: _MetricData) -> None: ...


class _Default:
    """Stands for "no handler for this group": passes values to the default handler of the moment.

    torch.distributed.elastic.metrics has no public way to remove a group's handler.
    """

    def emit(self, metric_data: _MetricData) -> None:
        from torch.distributed.elastic.metrics import getStream

        getStream(_UNCONFIGURED).handler.emit(metric_data)


class _Tee:
    """A handler that feeds `sink` while it is not None, and always `before`, whose errors reach the caller."""

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
    """Inside, values of put_metric go to `sink`, besides the handler that was configured before.

    At the end that handler is back, unless somebody has configured another one meanwhile, which then stays. Bridges of several
    agents in one process may end in any order.
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
            # Remove ended bridges from the top; one below a bridge that is still open stays, and passes values through.
            while isinstance(current, _Tee) and current.sink is None:
                current = current.before
            configure(current, GROUP)
