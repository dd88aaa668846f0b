"""Metrics of a training script, which its agent shows at /metrics: `from elastic_ext import metrics`.

    seen = metrics.counter("train_samples_total", "Samples trained on.")
    loss = metrics.gauge("train_loss", "Loss of the last step.")
    waited = metrics.histogram("train_data_wait_seconds", "Time for the next batch.", buckets=(0.01, 0.1, 1, 10))
    seen.inc(32); loss.set(2.5); waited.observe(0.02)

As with prometheus_client, `labels=("split",)` names labels and `.labels("train")` picks a series. Any process may count: the
worker, children that it forks or spawns (a DataLoader's), any thread, a signal handler.

- Counters and histograms are summed over all processes of the node, and go on over restarts and rounds. They get no rank: after a
  restart a worker may have another one, which would end one series and begin another. Where you want one, name a label `rank`.
- A gauge is what was set last in a worker, or in one of its children that still run. It gets the labels `local_rank` and `rank`,
  is absent until it is set, and ends with its worker.
- Limits, for one process and for one node: MAX_NAMES names and MAX_SERIES label sets in all. More are dropped, with one warning.
- Numbers that are not finite cannot be summed: a histogram passes over them, a counter refuses them. A gauge shows them.

A change takes less than a microsecond, no system call, and no lock that another process could hold. Without our agent, or with
`metrics=off`, the calls do the same in plain memory, which is not read.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from elastic_ext.base import metric_files as layout
from elastic_ext.base.errors import UsageError
from elastic_ext.workers import worker_env

logger = logging.getLogger(__name__)


# Where this process keeps the values: in its own file, as `base.metric_files` describes it. Why not the values of
# prometheus_client (`MultiProcessValue`, `MmapedDict`): importing it settles for the whole process whether the user's own metrics
# are kept in files, before the script may have set PROMETHEUS_MULTIPROC_DIR. Each of its increments makes a system call (getpid).
# A child that is forked while a thread increments waits for ever, since its lock is never made again. And its files are sparse,
# so that a full /dev/shm would end the worker with SIGBUS. Without an agent the values are plain memory: the same code runs, and
# nothing is opened.


class _File:
    """The file of this process; see `base.metric_files`. It keeps no descriptor open but those of its maps."""

    def __init__(self, prefix: str) -> None:
        pid = os.getpid()
        self._path = f"{prefix}.{pid}.{layout.running_since(pid)}.{os.urandom(6).hex()}"
        self._chunks = 0
        self._add_chunk()

    def _add_chunk(self) -> None:
        begin = self._chunks * layout.CHUNK
        if begin + layout.CHUNK > layout.MAX_BYTES:
            raise OSError("too many metrics")
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if self._chunks else os.O_CREAT | os.O_EXCL)
        descriptor = os.open(self._path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, begin, layout.CHUNK)  # as in workers.progress: no hole, no SIGBUS
            self._map = mmap.mmap(descriptor, layout.CHUNK, offset=begin)
        finally:
            os.close(descriptor)
        self._chunks += 1
        self._used = layout.CHUNK_HEAD
        self._map[:8] = layout.MAGIC

    def add(self, key: bytes, count: int) -> memoryview[float]:
        """Add a series; return its values."""
        size = layout.record_bytes(key, count)
        if self._used + size > layout.CHUNK:
            self._add_chunk()
        # No signal is handled between these: a handler that adds a series gets the place behind this one.
        chunk, at = self._map, self._used
        self._used = at + size
        layout.RECORD_HEAD.pack_into(chunk, at, len(key), count)
        at += layout.RECORD_HEAD.size
        chunk[at + 8 * count : at + 8 * count + len(key)] = key
        words = memoryview(chunk).cast("Q")
        words[1] = max(words[1], at - layout.RECORD_HEAD.size + size)
        return memoryview(chunk)[at : at + 8 * count].cast("d")


class ProcessMetrics:
    """The series of this process. A forked child has the same ones, begins at 0, and makes its own file when it needs one."""

    def __init__(self) -> None:
        # held for each change; only by threads of this process. Re-entrant, since a signal handler may count, too
        self.lock = threading.RLock()
        self._file: _File | None = None
        self._alone = False  # no agent, or no room
        self._series: list[_Metric] = []

    def add(self, series: _Metric) -> None:
        """Add a series; if there is an agent, it sees it from now on. Hold the lock."""
        self._series.append(series)

    def open(self, series: _Metric) -> memoryview[float]:
        """Return a place for the values of a series, all 0. Hold the lock."""
        count = series.definition.values
        series.values = memoryview(array("d", bytes(8 * count)))
        if series.dropped or self._alone:
            return series.values
        try:
            if self._file is None:
                prefix = _prefix()
                if prefix is None:
                    self._alone = True
                    return series.values
                self._file = _File(prefix)
            series.values = self._file.add(layout.encoded(series.definition, series.label_values), count)
        except (OSError, ValueError) as error:
            self._alone = True
            logger.warning("metrics: the agent does not see new metrics of process %s: %s", os.getpid(), error)
        return series.values

    def after_fork(self) -> None:
        """Begin again in a child. A thread that is not in the child may have held the lock, or have half-opened a file."""
        self.lock = threading.RLock()
        self._file, self._alone = None, False
        for series in self._series:
            series.values = None


def _prefix() -> str | None:
    """Return the beginning of the file's path; None without an agent that shows metrics."""
    text = os.environ.get(worker_env.WORKER_ENV)
    if not text:
        return None
    prefix = worker_env.loads(text).get("metrics")
    return prefix if isinstance(prefix, str) else None


process = ProcessMetrics()
os.register_at_fork(after_in_child=process.after_fork)


# Those of prometheus_client, in seconds.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)

_AnyMetric = TypeVar("_AnyMetric", bound="_Metric")


def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
    """Return the counter of this name, which can only grow. It is shown with the suffix _total.

    Raises UsageError: Prometheus does not allow these names, or another metric has this one.
    """
    return _defined(Counter, layout.COUNTER, name, help, labels)


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    """Return the gauge of this name, a value that goes up and down. Raises UsageError as `counter` does."""
    return _defined(Gauge, layout.GAUGE, name, help, labels)


def histogram(name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = BUCKETS) -> Histogram:
    """Return the histogram of this name. buckets: upper bounds, +Inf may be left out. Raises UsageError as `counter` does."""
    return _defined(Histogram, layout.HISTOGRAM, name, help, labels, buckets)


class _Metric:
    """A metric, or one label set of it. Read and write `values` under `process.lock`; None: call `process.open` first."""

    __slots__ = ("_children", "definition", "dropped", "label_values", "values")

    def __init__(self, definition: layout.Definition, label_values: tuple[str, ...] = (), dropped: bool = False) -> None:
        """dropped: it is beyond the limits, so its values are not shown."""
        self.definition, self.label_values, self.dropped = definition, label_values, dropped
        self.values: memoryview[float] | None = None
        self._children: dict[tuple[str, ...] | None, _Metric] = {}  # by label values; None: those beyond the limit

    def labels(self: _AnyMetric, *values: object, **named: object) -> _AnyMetric:
        """Return the series with these label values, in the order of the names or by name. Raises UsageError for other labels."""
        names = self.definition.labels
        if named and not values and named.keys() == {*names}:
            values = tuple(named[name] for name in names)
            named = {}
        if named or len(values) != len(names) or not names or self.label_values:
            raise UsageError(f"{self.definition.name}: expected a value for each of its labels {names}, got {values or named}")
        key = tuple([str(value)[: layout.MAX_LABEL] for value in values])
        return self._children.get(key) or self._add(key)  # type: ignore[return-value]

    def _add(self, key: tuple[str, ...]) -> _Metric:
        clean = tuple([layout.printable(each, layout.MAX_LABEL) for each in key])
        if clean != key:
            return self._children.get(clean) or self._add(clean)
        with process.lock:
            if key not in self._children:
                if self.dropped or _registry.is_full(self.definition):
                    if None not in self._children:
                        self._children[None] = type(self)(self.definition, key, dropped=True)
                        process.add(self._children[None])
                    return self._children[None]
                self._children[key] = type(self)(self.definition, key)
                _registry.show(self._children[key])
            return self._children[key]

    def _opened(self) -> memoryview[float]:
        """Return the place of the values in this process."""
        if self.definition.labels and not self.label_values:
            raise UsageError(f"{self.definition.name} has labels: call .labels() with {self.definition.labels} first")
        return process.open(self)


class Counter(_Metric):
    """A number that only grows."""

    __slots__ = ()

    def inc(self, amount: float = 1.0) -> None:
        """Add to it. Raises UsageError if the amount is negative or not finite."""
        amount = float(amount)
        if not 0.0 <= amount < math.inf:
            raise UsageError(f"{self.definition.name}.inc({amount}): a counter only grows; expected a finite number, 0 or more")
        with process.lock:
            values = self.values or self._opened()
            values[0] += amount


class Gauge(_Metric):
    """A value that goes up and down. In a child of the worker `inc` and `dec` begin at 0."""

    __slots__ = ()

    def set(self, value: float) -> None:
        """Set it."""
        value = float(value)
        with process.lock:
            values = self.values or self._opened()
            values[0] = value
            values[1] = time.monotonic()

    def inc(self, amount: float = 1.0) -> None:
        """Add to it."""
        with process.lock:
            values = self.values or self._opened()
            values[0] += float(amount)
            values[1] = time.monotonic()

    def dec(self, amount: float = 1.0) -> None:
        """Subtract from it."""
        self.inc(-amount)


class Histogram(_Metric):
    """Counts observations by bucket, and sums them."""

    __slots__ = ()

    def observe(self, value: float) -> None:
        """Count a value. One that is not finite is passed over: it would make the sum useless for ever."""
        value = float(value)
        if not -math.inf < value < math.inf:
            return
        bucket = bisect_left(self.definition.bounds, value)
        with process.lock:
            values = self.values or self._opened()
            values[-1] += value
            values[bucket] += 1.0

    @contextmanager
    def time(self) -> Iterator[None]:
        """Observe how many seconds a `with` block takes, or each call of a function that this decorates."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.observe(time.perf_counter() - began)


class _Registry:
    """The metrics of this process by name. Hold the process's lock."""

    def __init__(self) -> None:
        self.metrics: dict[str, _Metric] = {}
        self._claimed: dict[str, str] = {}  # the metric that is shown by a name
        self._shown = 0
        self._warned = False

    def claim(self, definition: layout.Definition) -> None:
        """Reserve its names. Raises UsageError if another metric has one of them."""
        taken = sorted(name for name in definition.names if self._claimed.get(name, definition.name) != definition.name)
        other = self.metrics.get(self._claimed[taken[0]] if taken else definition.name)
        if other is not None and not other.definition.agrees(definition):
            raise UsageError(
                f"metrics.{definition.kind}(): {definition.name!r} is taken by another definition of the {other.definition.kind} "
                f"{other.definition.name!r}; expected the same kind, labels and buckets wherever a name is used"
            )
        self._claimed.update(dict.fromkeys(definition.names, definition.name))

    def is_full(self, definition: layout.Definition, names: bool = False) -> bool:
        """Return whether there is no room for another series, or for another name; warn once."""
        full = self._shown >= layout.MAX_SERIES or (names and len(self.metrics) >= layout.MAX_NAMES)
        if full and not self._warned:
            self._warned = True
            logger.warning(
                "metrics: more than %s names or %s label sets in this process: %s and further new ones are not shown; "
                "neither a name nor a label should hold a step or an id",
                layout.MAX_NAMES,
                layout.MAX_SERIES,
                definition.name,
            )
        return full

    def show(self, series: _Metric) -> None:
        """Keep a series; if there is an agent, it shows it from now on, at 0."""
        self._shown += 1
        process.add(series)
        process.open(series)


_registry = _Registry()


def _defined(
    kind: type[_AnyMetric], kind_name: str, name: str, help: str, labels: Sequence[str], buckets: Sequence[float] = ()
) -> _AnyMetric:
    try:
        definition = layout.define(kind_name, name, help, labels, buckets)
    except (TypeError, ValueError) as error:
        raise UsageError(f"metrics.{kind_name}(): {error}") from None
    with process.lock:
        known = _registry.metrics.get(definition.name)
        if known is not None and isinstance(known, kind) and known.definition.agrees(definition):
            return known
        if known is None and _registry.is_full(definition, names=True):
            metric = kind(definition, dropped=True)
            process.add(metric)
            return metric
        _registry.claim(definition)
        metric = kind(definition)
        _registry.metrics[definition.name] = metric
        if definition.labels:
            process.add(metric)
        else:
            _registry.show(metric)
    return metric
