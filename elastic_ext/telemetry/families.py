"""The families of the agent's metrics: names, labels, and which series are there from the start.

They follow Prometheus' guides on naming and instrumentation: base units in the names, timestamps in place of ages, attempts
beside failures, and known label values from 0 on, so that increase() sees the first event. No family can grow without limit:
`most` says how many series one agent has.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, cast

from prometheus_client import core
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from elastic_ext.base import diagnosis, goodput
from elastic_ext.events.event_table import FIRST_STEP, MEMBERSHIP
from elastic_ext.workers.standby.rules import ColdReason

Labels = tuple[str, ...]

OTHER = "other"  # a kind that a newer agent knows
WORKER_STATES = ("running", "stopped", "succeeded", "failed")
DETECT, LOAD = "detect", "load"
PHASES = (DETECT, "stop", "verdict", "rendezvous", "start", LOAD, FIRST_STEP)
STARTING, RUNNING, BACKOFF, ENDED = "start", "running", "backoff", "ended"
STATES = ("rendezvous", STARTING, RUNNING, "stop", "verdict", BACKOFF, ENDED)
SAVED, FAILED = "saved", "failed"
COPIED = "copied"
UNUSABLE = "unusable"
OK = "ok"
DECISIONS = ("stop", "confirm", "restart", "restart_free", "replace_node", "requeue")

# torchelastic and users have a few dozen names; names that contain a step or an id must not grow the agent's memory for days.
MAX_TORCHELASTIC_NAMES = 500

# Seconds. A warm standby starts in about 15 ms; a platform may take minutes to replace a node.
RECOVERY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Seconds. On a local network etcd answers a read in 1 ms and a write, which it syncs to disk, in 2 to 10; a call has 5 s.
CALL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
CLOCK_STEP_S = 1.0  # the clock was set if it moved by more between two looks; NTP slews by less

UNITS = ("seconds", "bytes", "ratio")
ZERO: tuple[Labels, ...] = ((),)  # known: the only series, without labels


@dataclass(frozen=True)
class Family:
    """A family. OpenMetrics shows its unit; if that is one of UNITS, the name ends with it."""

    kind: type[core.Metric]
    help: str
    labels: Labels
    known: tuple[Labels, ...]  # label values that are shown as 0 before anything happens
    most: str  # how many series one agent has, for people
    unit: str
    bounds: tuple[float, ...]  # of a histogram: the upper bounds of its buckets but the last

    @classmethod
    def of(
        cls,
        kind: type[core.Metric],
        help: str,
        *labels: str,
        known: tuple[Labels, ...] = (),
        most: str = "",
        unit: str = "",
        bounds: tuple[float, ...] = (),
    ) -> Family:
        usually = "one histogram" if bounds else str(max(1, len(known)))
        return cls(kind, help, labels, known, most or usually, unit, bounds)

    def new(self, name: str) -> core.Metric:
        if self.kind is core.InfoMetricFamily:
            return core.InfoMetricFamily(name, self.help, labels=self.labels)
        make: Callable[..., core.Metric] = self.kind
        ending = name.rpartition("_")[2]
        return make(name, self.help, labels=self.labels, unit=self.unit or (ending if ending in UNITS else ""))


counter, gauge = partial(Family.of, core.CounterMetricFamily), partial(Family.of, core.GaugeMetricFamily)
summary, histogram = partial(Family.of, core.SummaryMetricFamily), partial(Family.of, core.HistogramMetricFamily)
info = partial(Family.of, core.InfoMetricFamily)


def _per_worker(found: Mapping[str, Family]) -> dict[str, Family]:
    """Return the families of workers, given by the ends of their names: one series per worker unless they say more."""
    most = {name: family.most if family.most != "1" else "one per worker of the agent" for name, family in found.items()}
    return {
        f"elastic_ext_worker{name}": replace(family, labels=("local_rank", *family.labels), most=most[name])
        for name, family in found.items()
    }


def cumulative(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Return counts by bucket as Prometheus expects them: (upper bound, observations at or below it)."""
    below = zip((*bounds, math.inf), itertools.accumulate(counts), strict=True)
    return [(floatToGoString(bound), float(count)) for bound, count in below]  # type: ignore[no-untyped-call]


class HistogramCounts:
    """A histogram with counts by bucket. The caller holds the lock. bounds: the upper bounds of the buckets but the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, seconds: float) -> None:
        self.sum += seconds
        self._counts[bisect.bisect_left(self._bounds, seconds)] += 1

    def copy(self) -> HistogramCounts:
        made = HistogramCounts(self._bounds)
        made.sum, made._counts = self.sum, list(self._counts)
        return made

    def buckets(self) -> list[tuple[str, float]]:
        return cumulative(self._bounds, self._counts)


@dataclass(frozen=True)
class Total:
    count: int
    seconds: float


# Of a counter or gauge, info, summary, histogram; None: not shown.
Value = float | Mapping[str, str] | Total | HistogramCounts | None
Values = Iterator[tuple[str, Labels, Value]]  # name and labels of each


class UnixClock:
    """Turns monotonic seconds into Unix time. The same moment has the same time at each scrape, unless the clock is set."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()

    def at(self, monotonic_s: float) -> float:
        ahead_s = time.time() - time.monotonic()
        if abs(ahead_s - self._ahead_s) > CLOCK_STEP_S:
            self._ahead_s = ahead_s
        return round(monotonic_s + self._ahead_s, 3)


class FamilyCollector(Collector):
    """Keeps and shows the values of the families of one table. Any thread may call any method.

    Families are named without `elastic_ext_`.
    """

    table: ClassVar[Mapping[str, Family]]

    def __init__(self) -> None:
        # Re-entrant: a signal handler that calls put_metric may interrupt the thread that holds the lock.
        self._lock = threading.RLock()
        self._values: dict[str, dict[Labels, float]] = {
            name: dict.fromkeys(() if family.bounds else family.known, 0.0) for name, family in self.table.items()
        }
        self._histograms = {
            (name, labels): HistogramCounts(family.bounds)
            for name, family in self.table.items()
            for labels in (family.known if family.bounds else ())
        }

    def value(self, name: str) -> float:
        """Return the value of a family without labels, which is there."""
        with self._lock:
            return self._values[f"elastic_ext_{name}"][()]

    def _set(self, **values: float | None) -> None:
        """Set families without labels. None: absent."""
        with self._lock:
            for name, value in values.items():
                self._values[f"elastic_ext_{name}"] = {(): value} if value is not None else {}

    def _add(self, name: str, *labels: str, by: int = 1) -> None:
        with self._lock:
            values = self._values[f"elastic_ext_{name}"]
            values[labels] = values.get(labels, 0) + by

    def _observe(self, name: str, *labels: str, seconds: float) -> None:
        """Add to a histogram. Raises KeyError if these labels are not among the known ones."""
        with self._lock:
            self._histograms[f"elastic_ext_{name}", labels].observe(seconds)

    def describe(self) -> Iterator[core.Metric]:
        """Yield the families without values; the registry calls this when it registers a collector."""
        return (family.new(name) for name, family in self.table.items())

    def collect(self) -> Iterator[core.Metric]:
        """Yield the families with their values; called at each scrape, in the scrape's thread."""
        found = {name: family.new(name) for name, family in self.table.items()}
        for name, labels, value in self.values():
            if isinstance(value, HistogramCounts):
                cast("core.HistogramMetricFamily", found[name]).add_metric(labels, value.buckets(), value.sum)
            elif isinstance(value, Total):
                cast("core.SummaryMetricFamily", found[name]).add_metric(labels, value.count, value.seconds)
            elif isinstance(value, Mapping):
                cast("core.InfoMetricFamily", found[name]).add_metric(labels, dict(value))
            elif value is not None:
                cast("core.CounterMetricFamily", found[name]).add_metric(labels, value)
        yield from found.values()

    def values(self) -> Values:
        with self._lock:
            counts = [(name, labels, value) for name, of in self._values.items() for labels, value in of.items()]
            histograms = [(name, labels, each.copy()) for (name, labels), each in self._histograms.items()]
        yield from counts
        yield from histograms


def _known(*values: str) -> tuple[Labels, ...]:
    return tuple((value,) for value in values)


# The name of a counter is shown with the suffix _total, that of an info with _info.
JOB = {
    "elastic_ext_restarts": counter(
        "Restarts of this agent's workers, by the kind of failure that caused them. `node_lost`: a node was lost, whether or not "
        "workers failed of it; `membership`: nodes came or left, or workers failed on other nodes only.",
        "kind",
        known=_known(*diagnosis.KINDS, MEMBERSHIP, OTHER),
        most="one per kind",
    ),
    "elastic_ext_failures": counter("Failures, by kind.", "kind", known=_known(*diagnosis.KINDS, OTHER), most="one per kind"),
    "elastic_ext_restarts_charged": gauge("Restarts charged to the job's budget, by the last verdict; absent before the first."),
    "elastic_ext_max_restarts": gauge(
        "The job's restart budget, by the last verdict; absent before the first, and if there is no limit."
    ),
    "elastic_ext_last_recovery_seconds": gauge("How long the last finished recovery took."),
    "elastic_ext_last_recovery_timestamp_seconds": gauge("When the last finished recovery ended."),
    "elastic_ext_round": gauge("The rendezvous round.", known=ZERO),
    "elastic_ext_world_size": gauge("Workers in this round, over all nodes.", known=ZERO),
    "elastic_ext_workers": gauge("Workers of this agent, by state.", "state", known=_known(*WORKER_STATES)),
    "elastic_ext_agent_state": gauge(
        "What the agent does now (1): a phase of a recovery, or running, backoff, ended.", "state", known=_known(*STATES)
    ),
    "elastic_ext_ended_timestamp_seconds": gauge("Time at which the agent's part of the job ended; absent before that."),
    "elastic_ext_worker_starts": counter(
        "Workers started: warm (from a standby) or cold, with the reason for a cold start.",
        "how",
        "reason",
        known=(("warm", ""), *(("cold", each.value) for each in ColdReason)),
        most="one per reason",
    ),
    "elastic_ext_standbys": gauge("Warm standbys that are ready.", known=ZERO),
    "elastic_ext_standby_memory_bytes": gauge(
        "Memory of the warm standbys and their server; shared pages count once.", known=ZERO
    ),
    "elastic_ext_checkpoint_copied_bytes": counter("Bytes copied from local_dir to checkpoint_dir.", known=ZERO),
    "elastic_ext_checkpoint_copies": counter(
        "Copies of checkpoints to checkpoint_dir: complete there (copied), or failed (failed).",
        "outcome",
        known=_known(COPIED, FAILED),
    ),
    "elastic_ext_checkpoint_last_copy_timestamp_seconds": gauge(
        "Time at which the last copy of a checkpoint to checkpoint_dir was complete."
    ),
    "elastic_ext_checkpoint_uncopied_since_timestamp_seconds": gauge(
        "Time since which the oldest checkpoint that is not yet copied has waited; absent if all are copied."
    ),
    "elastic_ext_checkpoint_copy_lag_steps": gauge(
        "Steps from the newest complete checkpoint in checkpoint_dir to the newest in local_dir."
    ),
    "elastic_ext_memory_copies_lost": counter(
        "Rounds that resumed from an older checkpoint because a part of the newest copy in memory was lost; counted on the node "
        "of rank 0 only.",
        known=ZERO,
    ),
    "elastic_ext_torchelastic_last_value": gauge(
        "Last value passed to put_metric of torch.distributed.elastic.metrics.", "group", "name", most=f"{MAX_TORCHELASTIC_NAMES}"
    ),
    "elastic_ext_torchelastic_values": counter(
        "Calls to put_metric of torch.distributed.elastic.metrics.", "group", "name", most=f"{MAX_TORCHELASTIC_NAMES}"
    ),
}
INFO = "elastic_ext"
OTHERS = {
    "elastic_ext_recovery_seconds": histogram(
        "Duration of the phases of a recovery. detect: from the end of a worker here, or the last progress before a hang, until "
        "the agent acts; load: the script's load of its checkpoint, a part of first_step.",
        "phase",
        known=_known(*PHASES),
        most="one histogram per phase",
        bounds=RECOVERY_BUCKETS,
    ),
    "elastic_ext_recovery_whole_seconds": histogram(
        "Time from a failure, or a change of members, until all workers of this node have made a step again.",
        known=ZERO,
        bounds=RECOVERY_BUCKETS,
    ),
    "elastic_ext_checkpoint_copy_seconds": histogram(
        "Time to copy a checkpoint to checkpoint_dir, from the first byte of this node until it is complete there.",
        known=ZERO,
        bounds=RECOVERY_BUCKETS,
    ),
    INFO: info("Versions, run id and node of this agent."),
}
# Of failures and what the job has decided; see `agent_metrics`.
VERDICTS = {
    "elastic_ext_decisions": counter(
        "Verdicts of the job that this agent has seen, by the decision and the kind of failure.",
        "decision",
        "kind",
        known=tuple((decision, kind) for decision in DECISIONS for kind in (*diagnosis.KINDS, OTHER)),
        most="one per decision and kind",
    ),
    "elastic_ext_hangs": counter("Rounds that ended because no worker of the job made progress.", known=ZERO),
    "elastic_ext_node_strikes": gauge(
        "Failures that the job's verdicts have blamed on this node since its agent started.", known=ZERO
    ),
    "elastic_ext_refused_nodes": gauge("Hosts that the job refuses now, by the verdicts that this agent has seen.", known=ZERO),
}
# With ext_etcd, and with ext_c10d over several nodes, whose store speaks the same API; see `agent_metrics`.
ETCD = {
    "elastic_ext_etcd_call_seconds": histogram(
        "Time of calls to etcd, or to the store of ext_c10d over several nodes; each attempt counts, answered or not.",
        known=ZERO,
        bounds=CALL_BUCKETS,
    ),
    "elastic_ext_etcd_calls": counter(
        "Attempts to call etcd, or the store of ext_c10d over several nodes: answered (ok), or not (failed).",
        "outcome",
        known=_known(OK, FAILED),
    ),
    "elastic_ext_etcd_reconnects": counter(
        "How often the connection for watches, to etcd or the store of ext_c10d over several nodes, was lost and opened again.",
        known=ZERO,
    ),
    "elastic_ext_etcd_lease_expiry_timestamp_seconds": gauge(
        "Time until which this node's lease in etcd, or in the store of ext_c10d over several nodes, certainly holds; absent "
        "while it has none."
    ),
}
WORKERS = _per_worker(
    {
        "": info(
            "A worker's ranks, node and device. gpu_uuid joins DCGM's series; empty without NVML.", "rank", "node", "gpu_uuid"
        ),
        "_steps": counter("Optimizer steps of the worker since its start."),
        "_step_seconds": summary("Time from one optimizer step to the next, with all that the script does between them."),
        "_last_step_timestamp_seconds": gauge("Time of the worker's last optimizer step."),
        "_saved_step": gauge("Step of the last checkpoint that this worker saw committed."),
        "_last_save_timestamp_seconds": gauge("Time at which the worker last saw a checkpoint committed."),
        "_checkpoint_saves": counter(
            "Checkpoints that the worker has saved with the others since its start: committed (saved), or not (failed).",
            "outcome",
            most="two per worker of the agent",
        ),
        "_checkpoint_save_seconds": summary("Time of a save, from the request to the commit. Training goes on for most of it."),
        "_checkpoint_load_seconds": summary(
            "Time of the worker's loads of a checkpoint by elastic_ext.Checkpointer since its start, with the check of the files."
        ),
        "_checkpoint_verify_seconds": summary(
            "Time in which the worker, with the others, has checked the files of checkpoints for damage before a load."
        ),
        "_memory_copies": counter(
            "Copies of the worker's state in memory since its start: committed (saved), not made (failed), or damaged or "
            "unsuitable when they should be loaded (unusable).",
            "outcome",
            most="three per worker of the agent",
        ),
        "_memory_stall_seconds": summary("Time for which copies in memory have stalled the worker's training."),
        "_memory_step": gauge("Step of the last committed copy in memory."),
        "_memory_parts": counter(
            "Parts of copies in memory that the worker had to send to another node: arrived there (copied), or not (failed).",
            "outcome",
            most="two per worker of the agent",
        ),
        "_memory_sent_bytes": counter("Bytes of copies in memory that the worker has sent to another node."),
        "_memory_every_steps": gauge("Steps from one copy in memory to the next.", unit="steps"),
    }
)

# See `accounting`. "The job" is what this agent knows of it: other hosts, and earlier agents, as they last shared it.
GOODPUT = {
    "elastic_ext_goodput_seconds": counter(
        "Time of this agent, by state. Every second is in exactly one state; for running workers it is the mean over them.",
        "state",
        known=_known(*goodput.STATES),
    ),
    "elastic_ext_goodput_unsettled_seconds": gauge(
        "Time of the step that runs now, whose state is not known yet. With the counters it is the whole time of the agent."
    ),
    "elastic_ext_goodput_ratio": gauge("Share of the job's time in the state productive."),
    "elastic_ext_effective_training_time_ratio": gauge(
        "Share of the job's time that failures and starts did not take: the states productive, data_wait and checkpoint_save."
    ),
    "elastic_ext_tokens": counter("Tokens that the script has reported to this agent, by report_tokens()."),
    "elastic_ext_floating_point_operations": counter("Operations that the script has reported to this agent, by report_flops()."),
    "elastic_ext_checkpoint_interval_advised_seconds": gauge(
        "Advised time between two checkpoints, by Daly's formula; absent before 3 interruptions and 3 saves."
    ),
    "elastic_ext_checkpoint_stall_mean_seconds": gauge("Mean stall of training by a save; the advice comes from it."),
    "elastic_ext_restart_mean_seconds": gauge("Mean time of a start or restart until the job runs, shown with the advice."),
    "elastic_ext_interruption_interval_mean_seconds": gauge(
        "Mean time in which the job runs between two interruptions; the advice comes from it."
    ),
}
