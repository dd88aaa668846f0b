"""The agent's Prometheus metrics. This module keeps their values; prometheus-client provides families and the text format.

The counters of prometheus-client are not used. If PROMETHEUS_MULTIPROC_DIR is set, which is meant for the user's own workers,
they live in files in that directory: the agent would not start without the directory, two agents in one process would share
their values, and the workers' own /metrics would show the agent's values.
"""

from __future__ import annotations

import bisect
import logging
import math
import numbers
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from elastic_ext.base.kinds import KINDS
from elastic_ext.base.printable import shown

logger = logging.getLogger(__name__)

WORKER_STATES = ("running", "stopped", "succeeded", "failed")
PHASES = ("stop", "verdict", "rendezvous", "start")

# Seconds. A warm standby starts in about 15 ms; a platform may take minutes to replace a node.
RECOVERY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# torchelastic and users have a few dozen names; names that contain a step or an id must not grow the agent's memory for days.
MAX_TORCHELASTIC_NAMES = 500

MAX_LABEL = 200  # characters; the rest is cut off
RESTART_KINDS = frozenset({*KINDS, "membership"})
OTHER = "other"

Labels = tuple[str, ...]


@dataclass(frozen=True)
class WorkerProgress:
    """One worker at the time of a scrape.

    Attributes:
        last_step_age_s: seconds since its last optimizer step; None before the first.
        step_s: recent seconds per step; None if unknown.
        skew: step_s divided by the median of this agent's workers; None if unknown.
        saved_step: step of the last checkpoint that it saw committed; None before the first.
        failed_saves: saves that failed since then.
    """

    local_rank: int
    steps: int
    last_step_age_s: float | None
    step_s: float | None = None
    skew: float | None = None
    saved_step: int | None = None
    failed_saves: int = 0


@dataclass(frozen=True)
class _Family:
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    help: str
    labels: Labels = ()

    def new(self, name: str) -> CounterMetricFamily | GaugeMetricFamily:
        return self.kind(name, self.help, labels=self.labels)


# The name of a counter is shown with the suffix _total.
_FAMILIES = {
    "elastic_ext_restarts": _Family(CounterMetricFamily, "Restarts of the workers, by kind of cause.", ("kind",)),
    "elastic_ext_failures": _Family(CounterMetricFamily, "Failures, by kind.", ("kind",)),
    "elastic_ext_round": _Family(GaugeMetricFamily, "The rendezvous round."),
    "elastic_ext_world_size": _Family(GaugeMetricFamily, "Workers in this round, over all nodes."),
    "elastic_ext_workers": _Family(GaugeMetricFamily, "Workers of this agent, by state.", ("state",)),
    "elastic_ext_worker_starts": _Family(
        CounterMetricFamily,
        "Workers started: warm (from a standby) or cold, with the reason for a cold start.",
        ("how", "reason"),
    ),
    "elastic_ext_standbys": _Family(GaugeMetricFamily, "Warm standbys that are ready."),
    "elastic_ext_standby_memory_bytes": _Family(
        GaugeMetricFamily, "Memory of the warm standbys and their server; shared pages count once."
    ),
    "elastic_ext_checkpoint_copied_bytes": _Family(CounterMetricFamily, "Bytes copied from local_dir to checkpoint_dir."),
    "elastic_ext_checkpoint_copy_failures": _Family(CounterMetricFamily, "Failed attempts to copy checkpoints."),
    "elastic_ext_checkpoint_copy_lag_steps": _Family(
        GaugeMetricFamily, "Steps from the newest complete checkpoint in checkpoint_dir to the newest in local_dir."
    ),
    "elastic_ext_checkpoint_copy_lag_seconds": _Family(GaugeMetricFamily, "Time that the oldest uncopied checkpoint has waited."),
    "elastic_ext_torchelastic_last_value": _Family(
        GaugeMetricFamily, "Last value passed to put_metric of torch.distributed.elastic.metrics.", ("group", "name")
    ),
    "elastic_ext_torchelastic_values": _Family(
        CounterMetricFamily, "Calls to put_metric of torch.distributed.elastic.metrics.", ("group", "name")
    ),
}
_WORKER_FAMILIES = {
    "elastic_ext_worker_steps": _Family(CounterMetricFamily, "Optimizer steps of the worker since its start.", ("local_rank",)),
    "elastic_ext_worker_last_step_age_seconds": _Family(
        GaugeMetricFamily, "Time since the worker's last optimizer step.", ("local_rank",)
    ),
    "elastic_ext_worker_step_seconds": _Family(GaugeMetricFamily, "Recent time per optimizer step.", ("local_rank",)),
    "elastic_ext_worker_step_skew": _Family(
        GaugeMetricFamily, "Recent time per optimizer step, relative to the median of this agent's workers.", ("local_rank",)
    ),
    "elastic_ext_worker_saved_step": _Family(
        GaugeMetricFamily, "Step of the last checkpoint that this worker saw committed.", ("local_rank",)
    ),
    "elastic_ext_worker_failed_saves": _Family(
        GaugeMetricFamily, "Saves that failed since the last commit; alert at 3 or more.", ("local_rank",)
    ),
}
_RECOVERY = "elastic_ext_recovery_seconds"
_RECOVERY_HELP = "Duration of the phases of a recovery."


class AgentMetrics(Collector):
    """The metrics of one agent, in its own registry. Any thread may call any method.

    Args:
        version: version of this package.
        torch: torch's version; this module does not import torch.
        run_id: run id of the job.
        node: this node's name; default: its host name.
        progress: called at each scrape, in the scrape's thread. It should not raise, which would fail the whole scrape.
    """

    def __init__(
        self,
        *,
        version: str,
        torch: str,
        run_id: str,
        node: str = "",
        progress: Callable[[], Sequence[WorkerProgress]] = tuple,
    ) -> None:
        info = {"version": version, "torch": torch, "run_id": run_id, "node": node or platform.node()}
        self._info = {name: _label(value) for name, value in info.items()}
        self._progress = progress
        # Re-entrant: a signal handler that calls put_metric may interrupt the thread that holds the lock.
        self._lock = threading.RLock()
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in _FAMILIES}
        self._recovery = {phase: _Histogram() for phase in PHASES}
        self._full = False
        self.round_started(0, 0)
        self.workers()
        self.standbys(0, 0)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def restarted(self, kind: str) -> None:
        """Count a restart of the workers. kind: a kind of failure, or "membership"."""
        self._add("elastic_ext_restarts", (kind if kind in RESTART_KINDS else OTHER,))

    def failed(self, kind: str) -> None:
        """Count a failure. kind: the kind of the diagnosis."""
        self._add("elastic_ext_failures", (kind if kind in KINDS else OTHER,))  # the kind may come from another agent

    def round_started(self, round: int, world_size: int) -> None:
        """Record a new round. world_size: number of workers on all nodes."""
        with self._lock:
            self._values["elastic_ext_round"][()] = round
            self._values["elastic_ext_world_size"][()] = world_size

    def workers(self, *, running: int = 0, stopped: int = 0, succeeded: int = 0, failed: int = 0) -> None:
        """Set the number of this agent's workers in each state."""
        counts = zip(WORKER_STATES, (running, stopped, succeeded, failed), strict=True)
        with self._lock:
            self._values["elastic_ext_workers"] = {(state,): count for state, count in counts}

    def worker_started(self, how: str, reason: str) -> None:
        """Count a start of a worker.

        Args:
            how: "warm" or "cold".
            reason: reason of a cold start, from a fixed set, because each one creates a permanent time series.
        """
        self._add("elastic_ext_worker_starts", (_label(how), _label(reason)))

    def standbys(self, count: int, used_bytes: int) -> None:
        """Set the number of ready warm standbys, and the memory of the standbys and their server."""
        with self._lock:
            self._values["elastic_ext_standbys"][()] = count
            self._values["elastic_ext_standby_memory_bytes"][()] = used_bytes

    def phase(self, name: str, seconds: float) -> None:
        """Record the duration of a phase of a recovery. Raises KeyError if `name` is not in PHASES."""
        with self._lock:
            self._recovery[name].observe(seconds)

    def copied(self, size: int, lag_steps: int | None, lag_s: float, failed: bool) -> None:
        """Record the progress of copying checkpoints.

        Args:
            size: bytes copied since the last call.
            lag_steps: see elastic_ext_checkpoint_copy_lag_steps; None while checkpoint_dir is empty.
            lag_s: see elastic_ext_checkpoint_copy_lag_seconds.
            failed: whether an attempt to copy failed.
        """
        with self._lock:
            self._add("elastic_ext_checkpoint_copied_bytes", (), size)
            self._add("elastic_ext_checkpoint_copy_failures", (), int(failed))
            self._values["elastic_ext_checkpoint_copy_lag_steps"] = {(): lag_steps} if lag_steps is not None else {}
            self._values["elastic_ext_checkpoint_copy_lag_seconds"][()] = lag_s

    def copy_failed(self) -> None:
        """Count a failure of the copier itself: it died, or seems stuck."""
        self._add("elastic_ext_checkpoint_copy_failures", (), 1)

    def put(self, group: str, name: str, value: float) -> None:
        """Keep a value of torchelastic's put_metric, which accepts anything; drop it if it is not a number. Never raises.

        The first MAX_TORCHELASTIC_NAMES names are kept; later names are dropped, with one warning.
        """
        number = _number(value)
        if number is None:
            logger.debug("torchelastic metric %s/%s: %r is not a number, dropped", group, name, type(value))
            return
        labels = _label(group), _label(name)
        with self._lock:
            last_values = self._values["elastic_ext_torchelastic_last_value"]
            if labels in last_values or len(last_values) < MAX_TORCHELASTIC_NAMES:
                last_values[labels] = number
                self._add("elastic_ext_torchelastic_values", labels)
                return
            warned, self._full = self._full, True
        if not warned:
            logger.warning(
                "put_metric was called with more than %d names: %s/%s and other new names are not shown; "
                "a metric's name should not hold a step or an id",
                MAX_TORCHELASTIC_NAMES,
                *labels,
            )

    def _add(self, name: str, labels: Labels, count: int = 1) -> None:
        with self._lock:
            values = self._values[name]
            values[labels] = values.get(labels, 0) + count

    def describe(self) -> Iterator[Metric]:
        """Yield the families without values; the registry calls this when it registers a collector."""
        for name, family in {**_FAMILIES, **_WORKER_FAMILIES}.items():
            yield family.new(name)
        yield HistogramMetricFamily(_RECOVERY, _RECOVERY_HELP, labels=("phase",))
        yield InfoMetricFamily("elastic_ext", "Versions, run id and node of this agent.")

    def collect(self) -> Iterator[Metric]:
        """Yield the families with their values; called at each scrape, in the scrape's thread."""
        with self._lock:
            values = {name: dict(by_labels) for name, by_labels in self._values.items()}
            recovery = {phase: (histogram.buckets(), histogram.sum) for phase, histogram in self._recovery.items()}
        yield InfoMetricFamily("elastic_ext", "Versions, run id and node of this agent.", value=self._info)
        for name, by_labels in values.items():
            family = _FAMILIES[name].new(name)
            for labels, value in by_labels.items():
                family.add_metric(labels, value)
            yield family
        seconds = HistogramMetricFamily(_RECOVERY, _RECOVERY_HELP, labels=("phase",))
        for phase, (buckets, total) in recovery.items():
            seconds.add_metric((phase,), buckets, total)
        yield seconds
        yield from self._collect_progress()

    def _collect_progress(self) -> Iterator[Metric]:
        families = [family.new(name) for name, family in _WORKER_FAMILIES.items()]
        steps, ages, times, skews, saved, failed = families
        for worker in self._progress():
            labels = (str(worker.local_rank),)
            steps.add_metric(labels, worker.steps)
            if worker.last_step_age_s is not None:
                ages.add_metric(labels, worker.last_step_age_s)
            if worker.step_s is not None:
                times.add_metric(labels, worker.step_s)
            if worker.skew is not None:
                skews.add_metric(labels, worker.skew)
            if worker.saved_step is not None:
                saved.add_metric(labels, worker.saved_step)
            failed.add_metric(labels, worker.failed_saves)
        yield from families


class _Histogram:
    """A histogram with counts by bucket. The caller holds the lock."""

    def __init__(self) -> None:
        self.sum = 0.0
        self._counts = [0] * (len(RECOVERY_BUCKETS) + 1)

    def observe(self, seconds: float) -> None:
        self.sum += seconds
        self._counts[bisect.bisect_left(RECOVERY_BUCKETS, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts as Prometheus expects them: (upper bound, observations at or below it)."""
        shown, below = [], 0
        for bound, count in zip((*RECOVERY_BUCKETS, math.inf), self._counts, strict=True):
            below += count
            shown.append(("+Inf" if bound == math.inf else str(float(bound)), float(below)))
        return shown


def _label(value: str) -> str:
    """Make a label printable, since a lone surrogate, e.g. from an undecodable variable, would fail every scrape."""
    return shown(str(value))[:MAX_LABEL]


def _number(value: object) -> float | None:
    # Only real numbers of Python and numpy, because float() of a tensor would wait for its device.
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
