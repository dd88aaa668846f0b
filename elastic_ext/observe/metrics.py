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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, InfoMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from elastic_ext.base.kinds import KINDS
from elastic_ext.base.printable import shown
from elastic_ext.observe import families
from elastic_ext.observe.agent_state import AgentState
from elastic_ext.observe.families import COPIED, FAILED, MAX_TORCHELASTIC_NAMES, OTHER, PHASES, SAVED, WORKER_STATES, Labels
from elastic_ext.observe.recovery_trace import Course

logger = logging.getLogger(__name__)

# Seconds. A warm standby starts in about 15 ms; a platform may take minutes to replace a node.
RECOVERY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

MAX_LABEL = 200  # characters; the rest is cut off
CLOCK_STEP_S = 1.0  # the clock was set if it moved by more between two looks; NTP slews by less
RESTART_KINDS = frozenset({*KINDS, families.MEMBERSHIP})


@dataclass(frozen=True)
class WorkerProgress:
    """One worker at the time of a scrape. Times are monotonic seconds.

    Attributes:
        last_step_at: None before its first optimizer step.
        stepping_s: from its first step to its last.
        skew: its recent time per step divided by the median of this agent's workers; None if unknown.
        saved_step, saved_at: step and time of the last checkpoint that it saw committed; None before the first.
        loads, checks: numbers of checkpoints that it has loaded, and checked for damage. loading_s, checking_s: the time.
        copies, failed_copies, unusable_copies: numbers of copies in memory: made, not made, not loaded. copies_stall_s: the time.
        copied_step, copy_every: step of the last copy, and steps until the next; None if unknown.
        saves, failed_saves: numbers of its saves. saving_s: the time of all those that were committed, from request to commit.
        steps_before: steps of the job before its first one, if the script reports them; else None.
    """

    local_rank: int
    rank: int
    steps: int
    last_step_at: float | None = None
    stepping_s: float = 0.0
    skew: float | None = None
    saved_step: int | None = None
    saved_at: float | None = None
    saves: int = 0
    failed_saves: int = 0
    saving_s: float = 0.0
    loads: int = 0
    loading_s: float = 0.0
    checks: int = 0
    checking_s: float = 0.0
    copies: int = 0
    copies_stall_s: float = 0.0
    copied_step: int | None = None
    copy_every: int | None = None
    failed_copies: int = 0
    unusable_copies: int = 0
    steps_before: int | None = None


class UnixClock:
    """Turns monotonic seconds into Unix time. The same moment has the same time at each scrape, until somebody sets the clock."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()

    def at(self, monotonic_s: float) -> float:
        ahead_s = time.time() - time.monotonic()
        if abs(ahead_s - self._ahead_s) > CLOCK_STEP_S:
            self._ahead_s = ahead_s
        return round(monotonic_s + self._ahead_s, 3)

    def at_if_any(self, monotonic_s: float | None) -> float | None:
        return self.at(monotonic_s) if monotonic_s is not None else None


class AgentMetrics(Collector):
    """The metrics of one agent, in its own registry, with those of its process. Any thread may call any method.

    Args:
        version: version of this package.
        torch: torch's version; this module does not import torch.
        run_id: run id of the job.
        node: this node's name; default: its host name.
        cold_reasons: all reasons for a cold start.
        gpus: returns at once the UUID of each worker's GPU, by local rank, "" if unknown. Called at each scrape.
        progress: called at each scrape, in the scrape's thread. It should not raise, which would fail the whole scrape.

    Attributes:
        progress: as given. state: what the agent does.
    """

    def __init__(
        self,
        *,
        version: str,
        torch: str,
        run_id: str,
        node: str = "",
        cold_reasons: Iterable[str] = (),
        gpus: Callable[[], Sequence[str]] = tuple,
        progress: Callable[[], Sequence[WorkerProgress]] = tuple,
    ) -> None:
        info = {"version": version, "torch": torch, "run_id": run_id, "node": node or platform.node()}
        self._info = {name: _label(value) for name, value in info.items()}
        self._gpus = gpus
        self.progress = progress
        self._clock = UnixClock()
        # Re-entrant: a signal handler that calls put_metric may interrupt the thread that holds the lock.
        self._lock = threading.RLock()
        self._values: dict[str, dict[Labels, float]] = {
            name: dict.fromkeys(family.known, 0.0) for name, family in families.JOB.items()
        }
        self._values["elastic_ext_worker_starts"] = dict.fromkeys([("warm", ""), *(("cold", each) for each in cold_reasons)], 0.0)
        self._full = False
        self._phases = {phase: Histogram() for phase in PHASES}
        self._spans = {name: Histogram() for name in (families.WHOLE_RECOVERY, families.COPY)}
        self.state = AgentState()
        self.enter("rendezvous")
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    @property
    def labels(self) -> dict[str, str]:
        """Return what tells this agent from others: the job and the node."""
        return {name: self._info[name] for name in ("run_id", "node")}

    def enter(self, state: str) -> None:
        """Record what the agent does from now on. state: one of families.STATES."""
        with self._lock:
            values = self._values["elastic_ext_agent_state"]
            values.update(dict.fromkeys(values, 0.0))
            values[state,] = 1.0
            self.state.enter(state, now := time.monotonic())
            if state == families.ENDED:
                self._values["elastic_ext_ended_timestamp_seconds"].setdefault((), self._clock.at(now))

    def not_ready(self) -> str:
        """Return why the workers of this node do not run now; "" if they do."""
        return "" if self.state.name == families.RUNNING else f"not ready: {self.state.name}"

    def status(self) -> dict[str, object]:
        """Return what /status.json shows."""
        with self._lock:
            number, world = (int(self._values[f"elastic_ext_{name}"][()]) for name in ("round", "world_size"))
        return {"schema": 1, **self._info, "state": self.state.name, "round": number, "world_size": world}

    def restarted(self, kind: str) -> None:
        """Count a restart of the workers. kind: a kind of failure, or "membership"."""
        self._add("elastic_ext_restarts", (kind if kind in RESTART_KINDS else OTHER,))

    def failed(self, kind: str) -> None:
        """Count a failure. kind: of the diagnosis."""
        self._add("elastic_ext_failures", (kind if kind in KINDS else OTHER,))  # the kind may come from another agent

    def budget(self, charged: int, limit: int) -> None:
        """Set what a verdict says of the job's budget of restarts. A negative limit is none."""
        with self._lock:
            if charged or limit >= 0:  # else the verdict of one node, which does not know the job's budget
                self._values["elastic_ext_restarts_charged"][()] = charged
            if limit >= 0:
                self._values["elastic_ext_max_restarts"][()] = limit

    def recovered(self, course: Course, load_s: float = 0.0) -> None:
        """Record a recovery that is over. load_s: the longest load of a checkpoint by its workers; 0: none."""
        whole_s, first_step = course.end - course.begin, course.phases[-1]
        with self._lock:
            self._phases[families.FIRST_STEP].observe(first_step.end - first_step.begin)
            self._spans[families.WHOLE_RECOVERY].observe(whole_s)
            if load_s > 0:
                self._phases[families.LOAD].observe(load_s)
            self._values["elastic_ext_last_recovery_seconds"][()] = whole_s
            self._values["elastic_ext_last_recovery_timestamp_seconds"][()] = self._clock.at(course.end)

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
            self._phases[name].observe(seconds)

    def copied(self, size: int, lag_steps: int | None, lag_s: float, complete: bool, failed: bool) -> None:
        """Record the progress of copying checkpoints.

        Args:
            size: bytes copied since the last call.
            lag_steps: see elastic_ext_checkpoint_copy_lag_steps; None while checkpoint_dir is empty.
            lag_s: for how long the oldest checkpoint that is not copied has waited; 0 if all are.
            complete: whether a checkpoint has become complete in checkpoint_dir.
            failed: whether an attempt to copy failed.
        """
        now = time.monotonic()
        with self._lock:
            self._add("elastic_ext_checkpoint_copied_bytes", (), size)
            self._add("elastic_ext_checkpoint_copies", (COPIED,), int(complete))
            self._add("elastic_ext_checkpoint_copies", (FAILED,), int(failed))
            self._values["elastic_ext_checkpoint_copy_lag_steps"] = {(): lag_steps} if lag_steps is not None else {}
            waits: dict[Labels, float] = {(): self._clock.at(now - lag_s)} if lag_s > 0 else {}
            self._values["elastic_ext_checkpoint_uncopied_since_timestamp_seconds"] = waits
            if complete:
                self._values["elastic_ext_checkpoint_last_copy_timestamp_seconds"][()] = self._clock.at(now)

    def copy_took(self, seconds: float) -> None:
        """Record how long it took to copy a checkpoint."""
        with self._lock:
            self._spans[families.COPY].observe(seconds)

    def copies_lost(self) -> None:
        """Count a round that does not resume from the newest copy in memory."""
        self._add("elastic_ext_memory_copies_lost", ())

    def part_sent(self, size: int | None) -> None:
        """Count a part of a copy in memory, of so many bytes, that another node has, too; None: it does not have it."""
        self._add("elastic_ext_memory_parts", (FAILED if size is None else COPIED,))
        self._add("elastic_ext_memory_sent_bytes", (), size or 0)

    def copy_failed(self) -> None:
        """Count a failure of the copier itself: it died, or seems stuck."""
        self._add("elastic_ext_checkpoint_copies", (FAILED,))

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
        for name, family in {**families.JOB, **families.WORKERS, **families.OTHERS}.items():
            yield family.new(name)

    def collect(self) -> Iterator[Metric]:
        """Yield the families with their values; called at each scrape, in the scrape's thread."""
        workers = self.progress()
        with self._lock:
            values = {name: dict(by_labels) for name, by_labels in self._values.items()}
            phases = {phase: (histogram.buckets(), histogram.sum) for phase, histogram in self._phases.items()}
            spans = {name: (histogram.buckets(), histogram.sum) for name, histogram in self._spans.items()}
        info = cast("InfoMetricFamily", families.OTHERS[families.INFO].new(families.INFO))
        info.add_metric((), self._info)
        yield info
        for name, by_labels in values.items():
            family = families.JOB[name].new(name)
            for labels, value in by_labels.items():
                cast("CounterMetricFamily", family).add_metric(labels, value)
            yield family
        yield _histograms(families.RECOVERY, {(phase,): each for phase, each in phases.items()})
        for name, span in spans.items():
            yield _histograms(name, {(): span})
        yield from _of_workers(workers, self._gpus() if workers else [], self._info["node"], self._clock)


def _of_workers(workers: Sequence[WorkerProgress], gpus: Sequence[str], node: str, clock: UnixClock) -> Iterator[Metric]:
    """Yield the families of the workers. gpus: the UUID of each one's, by local rank."""
    found = {name: family.new(name) for name, family in families.WORKERS.items()}

    def add(name: str, labels: Labels, value: float | None) -> None:
        if value is not None:
            cast("CounterMetricFamily", found[f"elastic_ext_worker{name}"]).add_metric(labels, value)

    def add_times(name: str, labels: Labels, count: int, seconds: float) -> None:
        cast("SummaryMetricFamily", found[f"elastic_ext_worker{name}"]).add_metric(labels, count, seconds)

    for each in workers:
        labels = (str(each.local_rank),)
        gpu = _label(gpus[each.local_rank]) if each.local_rank < len(gpus) else ""
        whole = (*labels, str(each.rank), node, gpu)
        cast("InfoMetricFamily", found["elastic_ext_worker"]).add_metric(whole, {})
        add("_steps", labels, each.steps)
        add_times("_step_seconds", labels, max(0, each.steps - 1), each.stepping_s)
        add("_last_step_timestamp_seconds", labels, clock.at_if_any(each.last_step_at))
        add("_step_skew_ratio", labels, each.skew)
        add("_saved_step", labels, each.saved_step)
        add("_last_save_timestamp_seconds", labels, clock.at_if_any(each.saved_at))
        add("_checkpoint_saves", (*labels, SAVED), each.saves)
        add("_checkpoint_saves", (*labels, FAILED), each.failed_saves)
        add_times("_checkpoint_save_seconds", labels, each.saves, each.saving_s)
        add_times("_checkpoint_load_seconds", labels, each.loads, each.loading_s)
        add_times("_checkpoint_verify_seconds", labels, each.checks, each.checking_s)
        add("_memory_copies", (*labels, SAVED), each.copies)
        add("_memory_copies", (*labels, FAILED), each.failed_copies)
        add("_memory_copies", (*labels, families.UNUSABLE), each.unusable_copies)
        add_times("_memory_stall_seconds", labels, each.copies, each.copies_stall_s)
        add("_memory_step", labels, each.copied_step)
        add("_memory_every_steps", labels, each.copy_every)
    yield from found.values()


class Histogram:
    """A histogram with counts by bucket. The caller holds the lock. bounds: the upper bounds of the buckets but the last."""

    def __init__(self, bounds: Sequence[float] = RECOVERY_BUCKETS) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, seconds: float) -> None:
        self.sum += seconds
        self._counts[bisect.bisect_left(self._bounds, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts as Prometheus expects them: (upper bound, observations at or below it)."""
        shown, below = [], 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            below += count
            shown.append(("+Inf" if bound == math.inf else str(float(bound)), float(below)))
        return shown


def _histograms(name: str, found: Mapping[Labels, tuple[list[tuple[str, float]], float]]) -> Metric:
    """Return a family of histograms. found: buckets and sum, by labels."""
    family = cast("HistogramMetricFamily", families.OTHERS[name].new(name))
    for labels, (buckets, total) in found.items():
        family.add_metric(labels, buckets, total)
    return family


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
