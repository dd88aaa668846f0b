"""The metrics of training scripts on the agent, summed over the files of the workers' processes; see base.metric_files.

Counters and histograms never go back. What a process had counted when it ended goes into the sum of those that have ended, and
its file is removed, so that thousands of forked processes leave nothing. If a file turns to rubbish, its last good values stand.

prometheus_client makes the families. Its `MultiProcessCollector.merge` is not used: one file that it cannot read fails the whole
scrape, a negative size in a file can make it read for ever, and the files of ended processes would stay.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from elastic_ext.base import metric_files as layout
from elastic_ext.telemetry.families import cumulative

logger = logging.getLogger(__name__)

NO_ROUND = -1
MOST = 2.0**53  # a float counts no further
LOOK_S = 10.0  # how often ended processes are looked for without a scrape

Values = tuple[float, ...]
SeriesKey = tuple[str, tuple[str, ...]]  # name and label values


def newer(definition: layout.Definition, last: Values | None, read: Values) -> Values | None:
    """Return which values of a series to believe: those read now, or those read last, if the ones of now cannot be."""
    if len(read) != definition.values:
        return last
    if definition.kind == layout.GAUGE:
        return read if math.isfinite(read[1]) and read[1] > 0 else last
    counts = read if definition.kind == layout.COUNTER else read[:-1]
    if not all(0 <= count < math.inf for count in counts) or not math.isfinite(read[-1]):
        return last
    if definition.kind == layout.HISTOGRAM and not all(count.is_integer() and count <= MOST for count in counts):
        return last
    if last is not None and any(now < before for now, before in zip(counts, last, strict=False)):
        return last
    return read


def added(one: Values | None, other: Values) -> Values:
    return other if one is None else tuple(map(sum, zip(one, other, strict=True)))


def set_last(one: Values | None, other: Values) -> Values:
    return other if one is None or other[1] >= one[1] else one


@dataclass
class _Process:
    """One process's file, and what was read from it last."""

    path: str
    round: int
    local_rank: int
    rank: int
    pid: int
    since: str
    values: dict[SeriesKey, Values] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return layout.running_since(self.pid) == self.since


class ScriptMetrics(Collector):
    """The metrics that the scripts of this agent's workers define. Any thread may call any method."""

    def __init__(self, directory: str) -> None:
        """directory: made here, for this agent alone. Raises OSError."""
        os.mkdir(directory, 0o700)
        self._directory = directory
        self._lock = threading.Lock()
        self._round = self._begun = NO_ROUND  # that whose gauges are shown; the last one that began
        self._processes: dict[str, _Process] = {}  # by file name
        self._ended: dict[SeriesKey, Values] = {}
        self._left: dict[tuple[int, str], Values] = {}  # gauges of ended processes of the round, by rank and name
        self._known = _Known()
        self._looked_at = 0.0

    def message(self, round: int, local_rank: int, rank: int) -> dict[str, object]:
        """Return what a worker has to know; see workers.worker_env. From now on the gauges of this round are shown."""
        with self._lock:
            if round != self._begun:
                self._left.clear()
            self._round = self._begun = round
        return {"metrics": os.path.join(self._directory, f"{round}.{local_rank}.{rank}")}

    def round_ended(self) -> None:
        """Show no gauges, even if a process still runs; keep counters and histograms. The workers have ended."""
        with self._lock:
            self._round = NO_ROUND
            self._look()

    def gauges(self, rank: int) -> dict[str, float]:
        """Return the gauges without labels of this rank in this round, or until the next one begins, in the last one."""
        with self._lock:
            self._look()
            found = {name: values for (whose, name), values in self._left.items() if whose == rank}
            for process in self._processes.values():
                if process.round == self._begun and process.rank == rank:
                    for name, values in self._gauges_of(process):
                        found[name] = set_last(found.get(name), values)
        return {name: values[0] for name, values in found.items()}

    def _gauges_of(self, process: _Process) -> Iterator[tuple[str, Values]]:
        """Yield those of a process that have no labels."""
        for (name, labels), values in process.values.items():
            if not labels and self._known.definitions[name].kind == layout.GAUGE:
                yield name, values

    def look(self) -> None:
        """Take in what ended processes have left, unless that was done within LOOK_S. Cheap enough for the agent's loop."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            with self._lock:
                self._look()

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are not known before the scripts run, and never those of the agent."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the families; called at each scrape, in the scrape's thread."""
        with self._lock:
            self._look()
            sums, gauges = dict(self._ended), dict[tuple[SeriesKey, int, int], Values]()
            for process in self._processes.values():
                for key, values in process.values.items():
                    if self._known.definitions[key[0]].kind != layout.GAUGE:
                        sums[key] = added(sums.get(key), values)
                    elif process.round == self._round:
                        whose = key, process.local_rank, process.rank
                        gauges[whose] = set_last(gauges.get(whose), values)
            definitions = dict(self._known.definitions)
        families = {name: _family(each) for name, each in sorted(definitions.items())}
        for (name, labels), values in sums.items():
            _add(families[name], definitions[name], labels, values)
        for ((name, labels), local_rank, rank), values in gauges.items():
            _add(families[name], definitions[name], (*labels, str(local_rank), str(rank)), values)
        return list(families.values())

    def _look(self) -> None:
        """Read all files; take those of ended processes out. Hold the lock."""
        self._looked_at = time.monotonic()
        try:
            names = os.listdir(self._directory)
        except OSError:  # removed at the end of the job
            names = []
        for name in names:
            if name not in self._processes and (process := _named(self._directory, name)) is not None:
                self._processes[name] = process
        for name, process in list(self._processes.items()):
            runs = process.runs  # first: what a process has written before its end is then there
            self._read(process)
            if not runs:
                del self._processes[name]
                if process.round == self._begun:
                    for gauge, values in self._gauges_of(process):
                        self._left[process.rank, gauge] = set_last(self._left.get((process.rank, gauge)), values)
                for key, values in process.values.items():
                    if self._known.definitions[key[0]].kind != layout.GAUGE:
                        self._ended[key] = added(self._ended.get(key), values)
                with suppress(OSError):  # it is gone with the directory
                    os.unlink(process.path)

    def _read(self, process: _Process) -> None:
        for raw, read in layout.records(_content(process.path)):
            series = layout.decoded(raw)
            if series is None or not self._known.admits(*series):
                continue
            key = series[0].name, series[1]
            values = newer(series[0], process.values.get(key), read)
            if values is not None:
                process.values[key] = values


class _Known:
    """The metrics and label sets that are shown. The first definition of a name stands, as long as the agent runs."""

    def __init__(self) -> None:
        self.definitions: dict[str, layout.Definition] = {}
        self._claimed: set[str] = set()
        self._series: set[SeriesKey] = set()
        self._warned: set[str] = set()

    def admits(self, definition: layout.Definition, labels: tuple[str, ...]) -> bool:
        """Return whether this series is shown; if not, warn once for each reason."""
        key = definition.name, labels
        known = self.definitions.get(definition.name)
        if known is not None and not known.agrees(definition):
            return self._refuse("is not shown where workers, or the rounds of the job, define it in different ways", definition)
        if key in self._series:
            return True
        if known is None and self._claimed & definition.names:
            return self._refuse("is not shown: another metric is shown by that name", definition)
        if len(self._series) >= layout.MAX_SERIES or (known is None and len(self.definitions) >= layout.MAX_NAMES):
            most = f"more than {layout.MAX_NAMES} names or {layout.MAX_SERIES} label sets on this node"
            return self._refuse(f"and further new ones are not shown: {most}", definition)
        self._series.add(key)
        if known is None:
            self.definitions[definition.name] = definition
            self._claimed |= definition.names
        return True

    def _refuse(self, why: str, definition: layout.Definition) -> bool:
        if why not in self._warned:
            self._warned.add(why)
            logger.warning("metrics of the script: %s %s %s", definition.kind, definition.name, why)
        return False


def _named(directory: str, name: str) -> _Process | None:
    """Return the process whose file has this name; None if the name is not one of ours."""
    parts = name.split(".")
    if len(parts) != 6 or not all(each.isdecimal() and len(each) < 20 for each in parts[:5]):
        return None
    round, local_rank, rank, pid = map(int, parts[:4])
    return _Process(os.path.join(directory, name), round, local_rank, rank, pid, parts[4])


def _content(path: str) -> bytes:
    """Return what is in a file, up to a limit; nothing if it is not a regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        about = os.fstat(descriptor)
        return os.read(descriptor, min(about.st_size, layout.MAX_BYTES)) if stat.S_ISREG(about.st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _family(definition: layout.Definition) -> Metric:
    if definition.kind == layout.GAUGE:
        return GaugeMetricFamily(definition.name, definition.help, labels=(*definition.labels, *layout.PER_WORKER))
    kind = CounterMetricFamily if definition.kind == layout.COUNTER else HistogramMetricFamily
    return kind(definition.name, definition.help, labels=definition.labels)


def _add(family: Metric, definition: layout.Definition, labels: tuple[str, ...], values: Values) -> None:
    if isinstance(family, HistogramMetricFamily):
        family.add_metric(labels, cumulative(definition.bounds, values[:-1]), values[-1])
    elif isinstance(family, (CounterMetricFamily, GaugeMetricFamily)):
        family.add_metric(labels, values[0])
