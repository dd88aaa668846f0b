"""The families of the agent's metrics: names, labels, and which series are there from the start.

They follow Prometheus' guides on naming and instrumentation: base units in the names, timestamps in place of ages, attempts
beside failures, and known label values from 0 on, so that increase() sees the first event. No family can grow without limit:
`most` says how many series one agent has.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic_ext.base import goodput
from elastic_ext.base.kinds import KINDS

Labels = tuple[str, ...]

OTHER = "other"  # a kind that a newer agent knows
MEMBERSHIP = "membership"  # kind of a restart without a failure
WORKER_STATES = ("running", "stopped", "succeeded", "failed")
FIRST_STEP = "first_step"
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

_PER_WORKER = "one per worker of the agent"


@dataclass(frozen=True)
class Family:
    """A family.

    Attributes:
        unit: the end of the name; OpenMetrics shows it.
        known: label values that are shown as 0 before anything happens.
        most: how many series one agent has, for people.
    """

    kind: type[Metric]
    help: str
    labels: Labels = ()
    unit: str = ""
    known: tuple[Labels, ...] = ()
    most: str = "1"

    def new(self, name: str) -> Metric:
        """Return the family without values."""
        if self.kind is InfoMetricFamily:
            return InfoMetricFamily(name, self.help, labels=self.labels)
        make: Callable[..., Metric] = self.kind
        return make(name, self.help, labels=self.labels, unit=self.unit)


class Histogram:
    """A histogram with counts by bucket. The caller holds the lock. bounds: the upper bounds of the buckets but the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, seconds: float) -> None:
        self.sum += seconds
        self._counts[bisect.bisect_left(self._bounds, seconds)] += 1

    def copy(self) -> Histogram:
        made = Histogram(self._bounds)
        made.sum, made._counts = self.sum, list(self._counts)
        return made

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts as Prometheus expects them: (upper bound, observations at or below it)."""
        shown, below = [], 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            below += count
            shown.append(("+Inf" if bound == math.inf else str(float(bound)), float(below)))
        return shown


@dataclass(frozen=True)
class Total:
    """A value of a summary."""

    count: int
    seconds: float


Value = float | Mapping[str, str] | Total | Histogram | None  # of a counter or gauge, info, summary, histogram; None: not shown
Values = Iterator[tuple[str, Labels, Value]]  # name and labels of each


class FamilyCollector(Collector):
    """Shows the families of one table."""

    table: ClassVar[Mapping[str, Family]]

    def describe(self) -> Iterator[Metric]:
        """Yield the families without values; the registry calls this when it registers a collector."""
        return (family.new(name) for name, family in self.table.items())

    def collect(self) -> Iterator[Metric]:
        """Yield the families with their values; called at each scrape, in the scrape's thread."""
        found = {name: family.new(name) for name, family in self.table.items()}
        for name, labels, value in self.values():
            if isinstance(value, Histogram):
                cast("HistogramMetricFamily", found[name]).add_metric(labels, value.buckets(), value.sum)
            elif isinstance(value, Total):
                cast("SummaryMetricFamily", found[name]).add_metric(labels, value.count, value.seconds)
            elif isinstance(value, Mapping):
                cast("InfoMetricFamily", found[name]).add_metric(labels, dict(value))
            elif value is not None:
                cast("CounterMetricFamily", found[name]).add_metric(labels, value)
        yield from found.values()

    def values(self) -> Values:
        """Yield the values that there are now."""
        raise NotImplementedError


def _known(*values: str) -> tuple[Labels, ...]:
    return tuple((value,) for value in values)


# The name of a counter is shown with the suffix _total, that of an info with _info.
JOB = {
    "elastic_ext_restarts": Family(
        CounterMetricFamily,
        "Restarts of the workers, by kind of cause.",
        ("kind",),
        known=_known(*KINDS, MEMBERSHIP, OTHER),
        most="one per kind",
    ),
    "elastic_ext_failures": Family(
        CounterMetricFamily, "Failures, by kind.", ("kind",), known=_known(*KINDS, OTHER), most="one per kind"
    ),
    "elastic_ext_restarts_charged": Family(
        GaugeMetricFamily, "Restarts charged to the budget of the job, by the last verdict; absent before the first."
    ),
    "elastic_ext_max_restarts": Family(
        GaugeMetricFamily, "Restarts that the job may have, by the last verdict; absent before the first, and without a limit."
    ),
    "elastic_ext_last_recovery_seconds": Family(GaugeMetricFamily, "How long the last finished recovery took.", unit="seconds"),
    "elastic_ext_last_recovery_timestamp_seconds": Family(
        GaugeMetricFamily, "When the last finished recovery ended.", unit="seconds"
    ),
    "elastic_ext_round": Family(GaugeMetricFamily, "The rendezvous round.", known=((),)),
    "elastic_ext_world_size": Family(GaugeMetricFamily, "Workers in this round, over all nodes.", known=((),)),
    "elastic_ext_workers": Family(
        GaugeMetricFamily,
        "Workers of this agent, by state.",
        ("state",),
        known=_known(*WORKER_STATES),
        most=str(len(WORKER_STATES)),
    ),
    "elastic_ext_agent_state": Family(
        GaugeMetricFamily,
        "What the agent does now (1): a phase of a recovery, or running, backoff, ended.",
        ("state",),
        known=_known(*STATES),
        most=str(len(STATES)),
    ),
    "elastic_ext_ended_timestamp_seconds": Family(
        GaugeMetricFamily, "When the agent's part of the job ended; absent before that.", unit="seconds"
    ),
    "elastic_ext_worker_starts": Family(
        CounterMetricFamily,
        "Workers started: warm (from a standby) or cold, with the reason for a cold start.",
        ("how", "reason"),
        most="one per reason",
    ),
    "elastic_ext_standbys": Family(GaugeMetricFamily, "Warm standbys that are ready.", known=((),)),
    "elastic_ext_standby_memory_bytes": Family(
        GaugeMetricFamily,
        "Memory of the warm standbys and their server; shared pages count once.",
        unit="bytes",
        known=((),),
    ),
    "elastic_ext_checkpoint_copied_bytes": Family(
        CounterMetricFamily, "Bytes copied from local_dir to checkpoint_dir.", unit="bytes", known=((),)
    ),
    "elastic_ext_checkpoint_copies": Family(
        CounterMetricFamily,
        "Checkpoints that are complete in checkpoint_dir (copied), and attempts to copy that failed.",
        ("outcome",),
        known=_known(COPIED, FAILED),
        most="2",
    ),
    "elastic_ext_checkpoint_last_copy_timestamp_seconds": Family(
        GaugeMetricFamily, "When a checkpoint was last completed in checkpoint_dir.", unit="seconds"
    ),
    "elastic_ext_checkpoint_uncopied_since_timestamp_seconds": Family(
        GaugeMetricFamily, "Since when the oldest checkpoint that is not copied has waited; absent: all are.", unit="seconds"
    ),
    "elastic_ext_checkpoint_copy_lag_steps": Family(
        GaugeMetricFamily, "Steps from the newest complete checkpoint in checkpoint_dir to the newest in local_dir."
    ),
    "elastic_ext_memory_copies_lost": Family(
        CounterMetricFamily,
        "Rounds that resume from an older checkpoint because no node has some part of the newest copy in memory, on the "
        "node of rank 0.",
        known=((),),
    ),
    "elastic_ext_memory_parts": Family(
        CounterMetricFamily,
        "Parts of copies in memory that another node has as well (copied), and that it does not have (failed).",
        ("outcome",),
        known=_known(COPIED, FAILED),
        most="2",
    ),
    "elastic_ext_memory_sent_bytes": Family(
        CounterMetricFamily, "Bytes of copies in memory sent to the node that keeps them as well.", unit="bytes", known=((),)
    ),
    "elastic_ext_torchelastic_last_value": Family(
        GaugeMetricFamily,
        "Last value passed to put_metric of torch.distributed.elastic.metrics.",
        ("group", "name"),
        most=str(MAX_TORCHELASTIC_NAMES),
    ),
    "elastic_ext_torchelastic_values": Family(
        CounterMetricFamily,
        "Calls to put_metric of torch.distributed.elastic.metrics.",
        ("group", "name"),
        most=str(MAX_TORCHELASTIC_NAMES),
    ),
}
RECOVERY = "elastic_ext_recovery_seconds"
WHOLE_RECOVERY = "elastic_ext_recovery_whole_seconds"
COPY = "elastic_ext_checkpoint_copy_seconds"
INFO = "elastic_ext"
OTHERS = {
    RECOVERY: Family(
        HistogramMetricFamily,
        "Duration of the phases of a recovery. detect: from the end of a worker here, or the last progress before a hang, until "
        "the agent acts; load: the script's load of its checkpoint, a part of first_step.",
        ("phase",),
        unit="seconds",
        most="one histogram per phase",
    ),
    WHOLE_RECOVERY: Family(
        HistogramMetricFamily,
        "Time from a failure, or a change of members, until all workers of this node have made a step again.",
        unit="seconds",
        most="one histogram",
    ),
    COPY: Family(
        HistogramMetricFamily,
        "Time to copy a checkpoint to checkpoint_dir, from the first byte of this node until it is complete there.",
        unit="seconds",
        most="one histogram",
    ),
    INFO: Family(InfoMetricFamily, "Versions, run id and node of this agent."),
}
# Of failures and what the job has decided; see `collectors`.
INCIDENTS = {
    "elastic_ext_decisions": Family(
        CounterMetricFamily,
        "Verdicts of the job that this agent has seen, by the decision and the kind of failure.",
        ("decision", "kind"),
        known=tuple((decision, kind) for decision in DECISIONS for kind in (*KINDS, OTHER)),
        most="one per decision and kind",
    ),
    "elastic_ext_hangs": Family(
        CounterMetricFamily, "Rounds that ended because no worker of the job made progress.", known=((),)
    ),
    "elastic_ext_node_strikes": Family(
        GaugeMetricFamily, "Failures that verdicts of the job have put on this node, since its agent started.", known=((),)
    ),
    "elastic_ext_refused_nodes": Family(
        GaugeMetricFamily, "Hosts that may not come back to the job now, by the verdicts that this agent has seen.", known=((),)
    ),
}
# With ext_etcd only; see `collectors`.
ETCD_CALL = "elastic_ext_etcd_call_seconds"
ETCD_CALLS = "elastic_ext_etcd_calls"
ETCD_RECONNECTS = "elastic_ext_etcd_reconnects"
ETCD_LEASE = "elastic_ext_etcd_lease_expiry_timestamp_seconds"
ETCD = {
    ETCD_CALL: Family(
        HistogramMetricFamily,
        "ext_etcd: time of calls to etcd, each attempt for itself, answered or not.",
        unit="seconds",
        most="one histogram",
    ),
    ETCD_CALLS: Family(
        CounterMetricFamily,
        "ext_etcd: attempts to call etcd: answered (ok), or not served by the member that was asked (failed).",
        ("outcome",),
        known=_known(OK, FAILED),
        most="2",
    ),
    ETCD_RECONNECTS: Family(
        CounterMetricFamily,
        "ext_etcd: how often the stream of all watches had to be opened again: its connection was lost.",
        known=((),),
    ),
    ETCD_LEASE: Family(
        GaugeMetricFamily,
        "ext_etcd: until when etcd certainly keeps this node in the job; absent before and after that.",
        unit="seconds",
    ),
}
WORKERS = {
    "elastic_ext_worker": Family(
        InfoMetricFamily,
        "A worker's ranks, node and device. gpu_uuid joins DCGM's series; empty without NVML.",
        ("local_rank", "rank", "node", "gpu_uuid"),
        most=_PER_WORKER,
    ),
    "elastic_ext_worker_steps": Family(
        CounterMetricFamily, "Optimizer steps of the worker since its start.", ("local_rank",), most=_PER_WORKER
    ),
    "elastic_ext_worker_step_seconds": Family(
        SummaryMetricFamily,
        "Time from one optimizer step to the next, with all that the script does between them.",
        ("local_rank",),
        unit="seconds",
        most=_PER_WORKER,
    ),
    "elastic_ext_worker_last_step_timestamp_seconds": Family(
        GaugeMetricFamily, "When the worker did its last optimizer step.", ("local_rank",), unit="seconds", most=_PER_WORKER
    ),
    "elastic_ext_worker_step_skew_ratio": Family(
        GaugeMetricFamily,
        "Recent time per optimizer step, relative to the median of this agent's workers.",
        ("local_rank",),
        unit="ratio",
        most=_PER_WORKER,
    ),
    "elastic_ext_worker_saved_step": Family(
        GaugeMetricFamily, "Step of the last checkpoint that this worker saw committed.", ("local_rank",), most=_PER_WORKER
    ),
    "elastic_ext_worker_last_save_timestamp_seconds": Family(
        GaugeMetricFamily, "When the worker last saw a checkpoint committed.", ("local_rank",), unit="seconds", most=_PER_WORKER
    ),
    "elastic_ext_worker_checkpoint_saves": Family(
        CounterMetricFamily,
        "Checkpoints that the worker has saved with the others since its start: committed (saved), or not (failed).",
        ("local_rank", "outcome"),
        most="two per worker of the agent",
    ),
    "elastic_ext_worker_checkpoint_save_seconds": Family(
        SummaryMetricFamily,
        "Time of a save, from the request to the commit. Training goes on for most of it.",
        ("local_rank",),
        unit="seconds",
        most=_PER_WORKER,
    ),
    "elastic_ext_worker_checkpoint_load_seconds": Family(
        SummaryMetricFamily,
        "Time of the worker's loads of a checkpoint by elastic_ext.Checkpointer since its start, with the check of the files.",
        ("local_rank",),
        unit="seconds",
        most=_PER_WORKER,
    ),
    "elastic_ext_worker_checkpoint_verify_seconds": Family(
        SummaryMetricFamily,
        "Time in which the worker, with the others, has checked the files of checkpoints for damage before a load.",
        ("local_rank",),
        unit="seconds",
        most=_PER_WORKER,
    ),
    "elastic_ext_worker_memory_copies": Family(
        CounterMetricFamily,
        "Copies of the worker's state in memory since its start: committed (saved), not made (failed), or not loaded, as damaged "
        "or not fitting (unusable).",
        ("local_rank", "outcome"),
        most="three per worker of the agent",
    ),
    "elastic_ext_worker_memory_stall_seconds": Family(
        SummaryMetricFamily,
        "Time for which copies in memory have stalled the worker's training.",
        ("local_rank",),
        unit="seconds",
        most=_PER_WORKER,
    ),
    "elastic_ext_worker_memory_step": Family(
        GaugeMetricFamily, "Step of the last committed copy in memory.", ("local_rank",), most=_PER_WORKER
    ),
    "elastic_ext_worker_memory_every_steps": Family(
        GaugeMetricFamily, "Steps from one copy in memory to the next.", ("local_rank",), unit="steps", most=_PER_WORKER
    ),
}

# See `collectors`. "The job" is what this agent knows of it: other hosts, and earlier agents, as they last shared it.
GOODPUT = {
    "elastic_ext_goodput_seconds": Family(
        CounterMetricFamily,
        "Time of this agent, by state. Every second is in exactly one state; running workers count with the mean over them.",
        ("state",),
        unit="seconds",
        known=_known(*goodput.STATES),
        most=str(len(goodput.STATES)),
    ),
    "elastic_ext_goodput_unsettled_seconds": Family(
        GaugeMetricFamily,
        "Time of this agent whose state is not known yet: the step that runs now. The counters and it are all time of the agent.",
        unit="seconds",
    ),
    "elastic_ext_goodput_ratio": Family(GaugeMetricFamily, "The productive part of the job's time.", unit="ratio"),
    "elastic_ext_effective_training_time_ratio": Family(
        GaugeMetricFamily,
        "The part of the job's time that failures and starts did not take: productive, data_wait and checkpoint_save.",
        unit="ratio",
    ),
    "elastic_ext_tokens": Family(CounterMetricFamily, "Tokens that the script has reported to this agent, by report_tokens()."),
    "elastic_ext_floating_point_operations": Family(
        CounterMetricFamily, "Operations that the script has reported to this agent, by report_flops()."
    ),
    "elastic_ext_checkpoint_interval_advised_seconds": Family(
        GaugeMetricFamily,
        "Advised time between checkpoints, by Daly; absent before 3 interruptions and 3 saves.",
        unit="seconds",
    ),
    "elastic_ext_checkpoint_stall_mean_seconds": Family(
        GaugeMetricFamily, "Mean stall of training by a save; the advice comes from it.", unit="seconds"
    ),
    "elastic_ext_restart_mean_seconds": Family(
        GaugeMetricFamily, "Mean time of a start or restart until the job runs, shown with the advice.", unit="seconds"
    ),
    "elastic_ext_interruption_interval_mean_seconds": Family(
        GaugeMetricFamily, "Mean time in which the job runs between two interruptions; the advice comes from it.", unit="seconds"
    ),
}
