"""The agent's Prometheus metrics. This module keeps their values; prometheus-client provides families and the text format.

The counters of prometheus-client are not used. If PROMETHEUS_MULTIPROC_DIR is set, which is meant for the user's own workers,
they live in files in that directory: the agent would not start without the directory, two agents in one process would share
their values, and the workers' own /metrics would show the agent's values.
"""

from __future__ import annotations

import ctypes
import logging
import math
import numbers
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from elastic_ext.base import diagnosis, printable, threads
from elastic_ext.events.event_table import FIRST_STEP, MEMBERSHIP, PastRecovery
from elastic_ext.telemetry import accounting, families
from elastic_ext.workers.progress import Progress

if TYPE_CHECKING:
    from torch.distributed.elastic.metrics.api import MetricData, MetricHandler

logger = logging.getLogger(__name__)

MAX_LABEL = 200  # characters; the rest is cut off
RESTART_KINDS = frozenset({*diagnosis.KINDS, MEMBERSHIP})


@dataclass(frozen=True)
class WorkerProgress:
    """One worker at the time of a scrape: its ranks, and its row of the progress table."""

    local_rank: int
    rank: int
    row: Progress


class AgentMetrics(families.FamilyCollector):
    """The metrics of one agent, in its own registry, with its goodput, which every change of state concerns, and its process.

    version, torch: versions of this package and of torch, which this module does not import. node: this node's name; default: its
    host name. gpus: returns at once the UUID of each worker's GPU, by local rank, "" if unknown. progress: should not raise,
    which would fail the whole scrape. Both are called at each scrape, in its thread.
    """

    table: ClassVar = {**families.JOB, **families.OTHERS, **families.WORKERS}

    def __init__(
        self,
        *,
        version: str,
        torch: str,
        run_id: str,
        node: str = "",
        gpus: Callable[[], Sequence[str]] = tuple,
        progress: Callable[[], Sequence[WorkerProgress]] = tuple,
    ) -> None:
        super().__init__()
        info = {"version": version, "torch": torch, "run_id": run_id, "node": node or platform.node()}
        self._info = {name: _label(value) for name, value in info.items()}
        self._gpus = gpus
        self.progress = progress
        self._clock = families.UnixClock()
        self._full = False
        self.goodput = accounting.Goodput()  # where the time goes
        # called when a checkpoint has become complete in checkpoint_dir, by the copier's thread; see `copied`
        self.on_copied: Callable[[int | None], object] = lambda lag_steps: None
        self.state, self.since = "", 0.0  # what the agent does, and since when, monotonic
        # called with name and time of each new state, by the agent's loop: it must return at once
        self.on_state: Callable[[str, float], None] = lambda name, at: None
        self.enter("rendezvous")
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(self.goodput)
        self.registry.register(ScriptGauges(progress))
        ProcessCollector(registry=self.registry)

    @property
    def labels(self) -> dict[str, str]:
        """Return what distinguishes this agent from others: the job and the node."""
        return {name: self._info[name] for name in ("run_id", "node")}

    def enter(self, state: str) -> None:
        """Record what the agent does from now on: one of families.STATES. Entering a state again changes nothing."""
        self.goodput.enter(state)
        with self._lock:
            values = self._values["elastic_ext_agent_state"]
            values.update(dict.fromkeys(values, 0.0))
            values[state,] = 1.0
            now = time.monotonic()
            if state != self.state:
                self.state, self.since = state, now
                self.on_state(state, now)
            if state == families.ENDED:
                self._values["elastic_ext_ended_timestamp_seconds"].setdefault((), self._clock.at(now))

    def not_ready(self) -> str:
        """Return why the workers of this node do not run now; "" if they do."""
        return "" if self.state == families.RUNNING else f"not ready: {self.state}"

    def status(self) -> dict[str, object]:
        """Return what /status.json shows."""
        place = {name: int(self.value(name)) for name in ("round", "world_size")}
        return {"schema": 1, **self._info, "state": self.state, **place, "goodput": self.goodput.status()}

    def restarted(self, kind: str) -> None:
        """Count a restart of the workers. kind: a kind of failure, or "membership"."""
        self._add("restarts", kind if kind in RESTART_KINDS else families.OTHER)

    def failed(self, kind: str) -> None:
        self.goodput.decided(kind)
        self._add("failures", kind if kind in diagnosis.KINDS else families.OTHER)  # the kind may come from another agent

    def budget(self, charged: int, limit: int) -> None:
        """Set the job's budget of restarts as a verdict states it. A negative limit means no limit."""
        if charged or limit >= 0:  # else the verdict of one node, which does not know the job's budget
            self._set(restarts_charged=charged)
        if limit >= 0:
            self._set(max_restarts=limit)

    def recovered(self, recovery: PastRecovery, load_s: float = 0.0) -> None:
        """Record a recovery that is over. load_s: the longest load of a checkpoint by its workers; 0: none."""
        whole_s, first_step = recovery.end - recovery.begin, recovery.phases[-1]
        with self._lock:
            self.phase(FIRST_STEP, first_step.end - first_step.begin)
            self._observe("recovery_whole_seconds", seconds=whole_s)
            if load_s > 0:
                self.phase(families.LOAD, load_s)
            self._set(last_recovery_seconds=whole_s, last_recovery_timestamp_seconds=self._clock.at(recovery.end))

    def round_started(self, round: int, world_size: int) -> None:
        """Record a new round. world_size: number of workers on all nodes."""
        self._set(round=round, world_size=world_size)

    def workers(self, *, running: int = 0, stopped: int = 0, succeeded: int = 0, failed: int = 0) -> None:
        counts = zip(families.WORKER_STATES, (running, stopped, succeeded, failed), strict=True)
        with self._lock:
            self._values["elastic_ext_workers"] = {(state,): count for state, count in counts}

    def worker_started(self, how: str, reason: str) -> None:
        """Count a start of a worker. how: "warm" or "cold". reason: of a cold start, a `ColdReason`: each is a series."""
        self._add("worker_starts", _label(how), _label(reason))

    def standbys(self, count: int, used_bytes: int) -> None:
        """Set the number of ready warm standbys, and the memory of the standbys and their server."""
        self._set(standbys=count, standby_memory_bytes=used_bytes)

    def phase(self, name: str, seconds: float) -> None:
        """Record the duration of a phase of a recovery. Raises KeyError if `name` is not in families.PHASES."""
        self._observe("recovery_seconds", name, seconds=seconds)

    def copied(self, size: int, lag_steps: int | None, lag_s: float, complete: bool, failed: bool) -> None:
        """Record the progress of copying checkpoints.

        size: bytes copied since the last call. lag_steps: see elastic_ext_checkpoint_copy_lag_steps; None while checkpoint_dir is
        empty. lag_s: for how long the oldest checkpoint that is not copied has waited; 0 if all are. complete: whether a
        checkpoint has become complete in checkpoint_dir. failed: whether an attempt to copy failed.
        """
        now = time.monotonic()
        with self._lock:
            self._add("checkpoint_copied_bytes", by=size)
            self._add("checkpoint_copies", families.COPIED, by=int(complete))
            self._add("checkpoint_copies", families.FAILED, by=int(failed))
            waits_since = self._clock.at(now - lag_s) if lag_s > 0 else None
            self._set(checkpoint_copy_lag_steps=lag_steps, checkpoint_uncopied_since_timestamp_seconds=waits_since)
            if complete:
                self._set(checkpoint_last_copy_timestamp_seconds=self._clock.at(now))
        if complete:
            self.on_copied(lag_steps)

    def copy_took(self, seconds: float) -> None:
        self._observe("checkpoint_copy_seconds", seconds=seconds)

    def copies_lost(self) -> None:
        """Count a round that does not resume from the newest copy in memory."""
        self._add("memory_copies_lost")

    def copy_failed(self) -> None:
        """Count a failure of the copier itself: it died, or seems stuck."""
        self._add("checkpoint_copies", families.FAILED)

    def put(self, group: str, name: str, value: float) -> None:
        """Keep a value of torchelastic's put_metric, which accepts anything; drop it if it is not a number. Never raises.

        The first families.MAX_TORCHELASTIC_NAMES names are kept; later names are dropped, with one warning.
        """
        number = _number(value)
        if number is None:
            logger.debug("torchelastic metric %s/%s: %r is not a number, dropped", group, name, type(value))
            return
        labels = _label(group), _label(name)
        with self._lock:
            last_values = self._values["elastic_ext_torchelastic_last_value"]
            if labels in last_values or len(last_values) < families.MAX_TORCHELASTIC_NAMES:
                last_values[labels] = number
                self._add("torchelastic_values", *labels)
                return
            warned, self._full = self._full, True
        if not warned:
            logger.warning(
                "put_metric was called with more than %d names: %s/%s and other new names are not shown; "
                "a metric's name should not hold a step or an id",
                families.MAX_TORCHELASTIC_NAMES,
                *labels,
            )

    def values(self) -> families.Values:
        workers = self.progress()
        yield families.INFO, (), self._info
        yield from super().values()
        gpus = self._gpus() if workers else ()
        for each in workers:
            gpu = _label(gpus[each.local_rank]) if each.local_rank < len(gpus) else ""
            yield "elastic_ext_worker", (str(each.local_rank), str(each.rank), self._info["node"], gpu), {}
            for name, labels, value in self._of_worker(each):
                yield f"elastic_ext_worker_{name}", (str(each.local_rank), *labels), value

    def _of_worker(self, each: WorkerProgress) -> families.Values:
        """Yield the values of a worker. The names lack elastic_ext_worker_, and the labels local_rank."""
        row = each.row
        yield "steps", (), row.steps
        yield "step_seconds", (), families.Total(max(0, row.steps - 1), max(0, row.last_step_ns - row.first_step_ns) / 1e9)
        yield "last_step_timestamp_seconds", (), self._clock.at(row.last_step_ns / 1e9) if row.last_step_ns else None
        yield "saved_step", (), row.saved_step
        yield "last_save_timestamp_seconds", (), self._clock.at(row.saved_ns / 1e9) if row.saved_ns else None
        yield "checkpoint_saves", (families.SAVED,), row.saves
        yield "checkpoint_saves", (families.FAILED,), row.failed_saves
        yield "checkpoint_save_seconds", (), families.Total(row.saves, row.saving_s)
        yield "checkpoint_load_seconds", (), families.Total(row.loads, row.loading_s)
        yield "checkpoint_verify_seconds", (), families.Total(row.checks, row.checking_s)
        yield "memory_copies", (families.SAVED,), row.copies
        yield "memory_copies", (families.FAILED,), row.failed_copies
        yield "memory_copies", (families.UNUSABLE,), row.unusable_copies
        yield "memory_stall_seconds", (), families.Total(row.copies, row.copies_stall_s)
        yield "memory_step", (), row.copied_step
        yield "memory_parts", (families.COPIED,), row.parts_sent
        yield "memory_parts", (families.FAILED,), row.parts_not_sent
        yield "memory_sent_bytes", (), row.sent_bytes
        yield "memory_every_steps", (), row.copy_every or None


class ScriptGauges(Collector):
    """What scripts show of themselves by `elastic_ext.report`, by the names that they have given."""

    def __init__(self, progress: Callable[[], Sequence[WorkerProgress]]) -> None:
        """progress: see `AgentMetrics`."""
        self._progress = progress

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are not known before the scripts run, and never those of the agent."""
        return ()

    def collect(self) -> Iterable[Metric]:
        found: dict[str, GaugeMetricFamily] = {}
        for each in self._progress():
            for name, value in each.row.gauges:
                new = GaugeMetricFamily(name, "Reported by the script.", labels=("local_rank", "rank"))
                found.setdefault(name, new).add_metric((str(each.local_rank), str(each.rank)), value)
        return found.values()


def _label(value: str) -> str:
    """Make a label printable, since a lone surrogate, e.g. from an undecodable variable, would fail every scrape."""
    return printable.shown(str(value))[:MAX_LABEL]


def _number(value: object) -> float | None:
    # Only real numbers of Python and numpy, because float() of a tensor would wait for its device.
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


# torchelastic's put_metric.

GROUP = "torchelastic"
_UNCONFIGURED = "elastic_ext: a group that is never configured"


class _Default:
    """Stands for "no handler for this group", as torch has no public way to remove one: passes values to the default one."""

    def emit(self, metric_data: MetricData) -> None:
        from torch.distributed.elastic.metrics import getStream

        getStream(_UNCONFIGURED).handler.emit(metric_data)


class _Tee:
    """A handler that feeds `metrics` unless that is None, and always feeds `before`, whose errors reach the caller."""

    def __init__(self, metrics: AgentMetrics, before: MetricHandler | _Default) -> None:
        self.metrics: AgentMetrics | None = metrics
        self.before = before

    def emit(self, metric_data: MetricData) -> None:
        if (metrics := self.metrics) is not None:
            metrics.put(metric_data.group_name, metric_data.name, metric_data.value)
        self.before.emit(metric_data)


@contextmanager
def bridge_torchelastic(metrics: AgentMetrics) -> Iterator[None]:
    """Inside this context, pass values of put_metric to `metrics` and to the handler that was configured before.

    The end restores that handler, unless another one was configured in the meantime, which then stays. Bridges of several agents
    in one process may end in any order.
    """
    from torch.distributed.elastic.metrics import configure, getStream

    before: MetricHandler | _Default = getStream(GROUP).handler
    if before is getStream(_UNCONFIGURED).handler:
        before = _Default()
    tee = _Tee(metrics, before)
    configure(tee, GROUP)
    try:
        yield
    finally:
        tee.metrics = None
        current = getStream(GROUP).handler
        if isinstance(current, _Tee):
            # Remove ended bridges from the top. One below an open bridge stays, and passes values through.
            while isinstance(current, _Tee) and current.metrics is None:
                current = current.before
            configure(current, GROUP)


# Which GPU each worker has, as NVML names it, joins our series to DCGM's. NVML makes no CUDA context.

_LIBRARY = "libnvidia-ml.so.1"
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE of nvml.h
UUID_PREFIXES = ("GPU-", "MIG-")


class GpuQuery:
    """A question to a driver, which may take seconds or never answer. It is asked once, on a thread of its own."""

    def __init__(self, ask: Callable[[], Sequence[str]]) -> None:
        self._ask = ask
        self._answer: Sequence[str] = ()
        self._asked = False

    def answer(self) -> Sequence[str]:
        """Return the answer; () until it comes. The first call asks. For one thread."""
        if not self._asked:
            self._asked = True
            threads.started(self._run, "elastic_ext-gpus", logger.warning, "metrics: the workers' GPUs are unknown: %s")
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except Exception:  # the top of a thread
            logger.exception("metrics: no GPU is named")


def gpu_uuids() -> list[str]:
    """Return the UUIDs of this host's GPUs, in the order of the PCI bus; empty if there is no NVML, or it does not answer."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        return []
    if (error := nvml.nvmlInit_v2()) != 0:
        logger.info("metrics: no GPU is named: NVML does not start (error %s)", error)
        return []
    found, count = list[str](), ctypes.c_uint()
    try:
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        for index in range(count.value):
            device, text = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0
            failed = failed or nvml.nvmlDeviceGetUUID(device, text, ctypes.c_uint(_UUID_BYTES)) != 0
            found.append("" if failed else text.value.decode(errors="replace"))
        return found
    finally:
        nvml.nvmlShutdown()


def gpus_by_local_rank(workers: int, host: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the UUID of each worker's GPU, by local rank; "" where it is not known.

    Each worker is taken to use the device of its local rank, as torchrun's scripts do, among those that CUDA_VISIBLE_DEVICES
    leaves it: indices, or UUIDs that may be cut short (CUDA's programming guide). CUDA numbers GPUs of different speed in
    another order than the PCI bus, unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set.

    host: as of `gpu_uuids`. environ: of the workers.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = list(host) if visible is None else [_named(each.strip(), host) for each in visible.split(",")]
    return [chosen[local_rank] if local_rank < len(chosen) else "" for local_rank in range(workers)]


def _named(device: str, host: Sequence[str]) -> str:
    if device.startswith(UUID_PREFIXES):
        return next((each for each in host if each.startswith(device)), device)
    return host[int(device)] if device.isdecimal() and int(device) < len(host) else ""


# Of what an agent learns from others: verdicts and hangs of the job, calls of etcd.

REPLACE = "replace_node"


class VerdictMetrics(families.FamilyCollector):
    """Incidents of the job that this agent knows of: hangs, verdicts, strikes against this node, refused hosts.

    The agents of a job do not read its ledger. So the strikes are those of this agent's time, and a node that a verdict does not
    reach (its own workers had not failed, and the next round began at once) may not count it.
    """

    table = families.VERDICTS

    def __init__(self, host: str, refuse_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """host: this node's, as verdicts name it. refuse_s: how long a verdict refuses a host, in seconds. now: the clock."""
        super().__init__()
        self._host, self._refuse_s, self._now = host, refuse_s, now
        self._refused: dict[str, float] = {}  # by host: when that ends
        self._last: tuple[int, str, str] | None = None

    def hung(self) -> None:
        self._add("hangs")

    def decided(self, round_: int, decision: str, kind: str, host: str) -> None:
        """Count a verdict once, however often it is reported.

        round_: the round that it ended. decision: one of families.DECISIONS; another one counts as a stop. kind: the kind of the
        failure; it may come from a newer agent. host: that of the cause.
        """
        with self._lock:
            if self._last == (round_, decision, host):
                return
            self._last = (round_, decision, host)
            known = decision if decision in families.DECISIONS else families.DECISIONS[0]
            self._add("decisions", known, kind if kind in diagnosis.KINDS else families.OTHER)
            self._add("node_strikes", by=int(host == self._host))
            if decision == REPLACE:
                self._refused[host] = self._now() + self._refuse_s

    def values(self) -> families.Values:
        with self._lock:
            now = self._now()
            self._refused = {host: until for host, until in self._refused.items() if until > now}
            self._set(refused_nodes=len(self._refused))
        yield from super().values()


@dataclass(frozen=True)
class OutageChange:
    """A change. over: etcd serves again. endpoint: asked last, or that answers again. seconds: how long without an answer."""

    over: bool
    endpoint: str
    seconds: float


class OutageWatch:
    """Reports an outage of etcd once it has lasted: the restart of a member does not count. Pure; times are monotonic seconds."""

    def __init__(self, after_s: float) -> None:
        """after_s: from the first failed call after the last answer."""
        self._after_s = after_s
        self._answered_at = float("-inf")
        self._since: float | None = None  # since when calls have failed
        self._reported = False

    def called(self, began: float, now: float, answered: bool, endpoint: str) -> OutageChange | None:
        """Note a call that began then and ends now; return what has changed by that."""
        if not answered:
            if self._since is None:
                self._since = max(began, self._answered_at)  # a call that failed late began before the last answer
            if self._reported or now - self._since < self._after_s:
                return None
            self._reported = True
            return OutageChange(False, endpoint, now - self._since)
        since, reported = self._since, self._reported
        self._since, self._reported, self._answered_at = None, False, now
        return OutageChange(True, endpoint, now - since) if reported and since is not None else None


class EtcdHealth(families.FamilyCollector):
    """How etcd serves this agent: an observer of the client's calls (`etcd.calls.CallObserver`). It never calls etcd itself."""

    table = families.ETCD

    def __init__(self, outage_s: float = math.inf, on_outage: Callable[[OutageChange], None] = lambda outage: None) -> None:
        """outage_s: how long an outage lasts before on_outage is called, and again at its end, on the thread of a call."""
        super().__init__()
        self.lease_until: Callable[[], float | None] = lambda: None  # until when etcd certainly keeps this node; monotonic
        self._outages, self._on_outage = OutageWatch(outage_s), on_outage
        self._clock = families.UnixClock()

    def called(self, seconds: float, answered: bool, endpoint: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._observe("etcd_call_seconds", seconds=seconds)
            self._add("etcd_calls", families.OK if answered else families.FAILED)
            outage = self._outages.called(now - seconds, now, answered, endpoint)
            if outage is not None:
                self._on_outage(outage)  # under the lock: its end must not be reported before it

    def reconnected(self) -> None:
        self._add("etcd_reconnects")

    def values(self) -> families.Values:
        yield from super().values()
        until = self.lease_until()
        yield "elastic_ext_etcd_lease_expiry_timestamp_seconds", (), self._clock.at(until) if until is not None else None
