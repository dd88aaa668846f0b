"""What an agent shows of itself, its workers and its job: metrics, pages, and the status of the whole job.

`JobView` reports this node to the job from a thread, and reads the reports of the others when a viewer asks. The agent's loop
only notes its state there: a rendezvous that does not answer delays neither it nor a scrape.
"""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing import SignalException

from elastic_ext.agent import companion, exits, verdicts
from elastic_ext.base import errors, threads
from elastic_ext.base.goodput import StateSeconds
from elastic_ext.base.settings import Settings
from elastic_ext.base.wakeup import Wakeup
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.failures.policy import Decision
from elastic_ext.features.table import FEATURES
from elastic_ext.http import pages, server
from elastic_ext.http import tls as server_tls
from elastic_ext.rendezvous.address import is_loopback
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.rendezvous.job_status import JobStatus
from elastic_ext.status import job_status
from elastic_ext.status.job_status import NodeReport, Own, ReportAges, RoundHistory, Sources, age_s
from elastic_ext.telemetry import families
from elastic_ext.telemetry.agent_metrics import AgentMetrics, EtcdHealth, OutageChange, VerdictMetrics, WorkerProgress
from elastic_ext.workers.progress import Progress

logger = logging.getLogger(__name__)

REPORT_S = 15.0  # between two reports of a node whose state does not change: 34 small writes a second from 512 nodes
SETTLE_S = 1.0  # from a change of state to its report: a recovery changes it several times, and its own writes come first
CHANGES_PER_S = 100.0  # reports of a change that all nodes make at once; 5 s for 512 nodes
CACHED_S = 1.0  # many viewers cost one read of the job in this time
ANSWER_S = 0.2  # that the HTTP server waits for a read; the next request gets what comes later
POINT_S = 30.0  # between two points of goodput, at first
MAX_POINTS = 120  # then every other one is dropped, and the time doubles
OUTAGE_SHARE = 0.5  # of lease_ttl: when that has passed without an answer, this node may soon count as lost


def settle_s(node_id: str, nodes: int) -> float:
    """Return the seconds from a change of state to its report: always the same for a node, and spread over this many nodes."""
    share = zlib.crc32(node_id.encode()) / 2**32
    return SETTLE_S + share * nodes / CHANGES_PER_S


class JobView:
    """Works from construction to `close`, which is for the agent's loop; `document` is for the server's thread."""

    def __init__(self, handler: Rendezvous, node: OwnNode) -> None:
        self._handler, self._node = handler, node
        self._ages = ReportAges()
        self._changed = threading.Condition()
        self._status = JobStatus.nothing(handler.get_run_id(), "the rendezvous has not answered yet")
        self._read_at: float | None = None
        self._answer: tuple[float, bytes] | None = None
        self._wanted = self._closing = self._new_state = False
        self._fault = ""
        node.on_state = self._on_state
        text = "status: this agent does not show the other nodes, and they do not show this one: %s"
        self._thread = threads.started(self._run, "elastic_ext-status", logger.warning, text)
        if self._thread is None:
            self._fault = "no thread can be started"

    def close(self, left_s: float, last_look: bool = False) -> None:
        """Report this node for the last time, for at most left_s. last_look: a viewer may still ask for the job."""
        with self._changed:
            self._wanted = self._wanted or (last_look and not self._closing)
            self._closing, self._fault = True, "this agent has left the job"
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(left_s)

    def document(self) -> bytes:
        """Return the job's status as JSON, at most CACHED_S old as far as the rendezvous answers.

        A rendezvous that does not answer holds up one call by ANSWER_S, and the calls after it not at all.
        """
        if self._answer is not None and time.monotonic() - self._answer[0] < CACHED_S:
            return self._answer[1]
        with self._changed:
            in_time = not (self._wanted or self._fault)  # the last time
            self._wanted = True
            self._changed.notify_all()
            if in_time:
                self._changed.wait_for(lambda: not self._wanted, ANSWER_S)
            status, fault, read_at = self._status, self._fault, self._read_at
        now = time.monotonic()
        read_s = round(now - read_at, 3) if read_at is not None else None
        backend, own = self._handler.get_backend(), self._node.now(now)
        built = job_status.build(Sources(status, backend, own, lambda id_: self._ages.age_s(id_, now), read_s, fault))
        self._answer = now, job_status.encode(built).encode()
        return self._answer[1]

    def _on_state(self) -> None:
        with self._changed:
            self._new_state = True
            self._changed.notify_all()

    # On the thread.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # the top of a thread
            logger.exception("status: the thread has failed, and the status of other nodes is no longer shown")
            with self._changed:
                self._fault = self._fault or "the thread that reads them has failed: see the agent's log"
                self._wanted = False
                self._changed.notify_all()

    def _serve(self) -> None:
        due = time.monotonic() + random.uniform(SETTLE_S, REPORT_S)  # agents that start together write apart
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted or self._new_state, max(0.0, due - time.monotonic()))
                closing, wanted, new_state = self._closing, self._wanted, self._new_state
                self._new_state = False
            settled_s = settle_s(self._handler.node.id, self._node.place.nodes)
            if new_state:
                due = min(due, time.monotonic() + settled_s)
            if closing:
                self._report(last=True)
                if wanted:
                    self._read_job()
                return
            if wanted:
                self._read_job()
            if time.monotonic() >= due:
                written = self._report(last=False)
                due = time.monotonic() + (REPORT_S if written else settled_s)

    def _report(self, last: bool) -> bool:
        """Return whether it was written."""
        report = self._node.now(time.monotonic()).report
        shown = report if report.node_rank == 0 else replace(report, rounds=(), gauges=())
        try:
            self._handler.show(job_status.encode_report(shown), last)
        except (errors.ElasticExtError, OSError) as error:
            logger.debug("status: this node's report was not written: %s", error)
            return False
        return True

    def _read_job(self) -> None:
        """Read the job's status, for the callers that wait in `document`."""
        now = time.monotonic()
        status, fault = self._status, ""
        try:
            status = self._handler.status()
        except (errors.ElasticExtError, OSError) as error:
            fault = str(error)
            if not self._fault:  # one line when the trouble begins
                logger.info("status: nothing new is known of the other nodes: %s", error)
        with self._changed:
            if not fault:
                self._ages.read(status, now)
                self._read_at = now
            if not self._closing:
                self._fault = fault
            self._status, self._wanted = status, False
            self._changed.notify_all()


@dataclass(frozen=True)
class NodePlace:
    """This node in its round. resumed_at: step that the round started from; None if unknown."""

    node_rank: int = -1
    base_rank: int = -1
    workers: int = 0
    resumed_at: int | None = None
    nodes: int = 0
    world: int = 0


def own_report(name: str, metrics: AgentMetrics, place: NodePlace, round_: int, now: float) -> NodeReport:
    """Return this node's report, without its rounds."""
    rows = metrics.progress()
    report = NodeReport(
        name=name,
        state=metrics.state,
        state_s=age_s(now, metrics.since),
        node_rank=place.node_rank,
        base_rank=place.base_rank,
        workers=place.workers,
        round=round_,
        standbys=int(metrics.value("standbys")),
        at=time.strftime("%Y-%m-%d %H:%M:%S%z"),
    )
    return _with_progress(report, [each.row for each in rows], place.resumed_at or 0, now) if rows else report


def _with_progress(report: NodeReport, rows: Sequence[Progress], resumed_at: int, now: float) -> NodeReport:
    slowest = min(rows, key=lambda row: row.steps)
    last_steps = [row.last_step_ns for row in rows if row.last_step_ns]
    saved = max((row for row in rows if row.saved_ns), key=lambda row: row.saved_ns, default=None)
    return replace(
        report,
        step=(resumed_at if slowest.steps_before is None else slowest.steps_before) + slowest.steps,
        total_steps=max((row.total_steps for row in rows if row.total_steps), default=None),
        steps_per_s=round((slowest.steps - 1) / slowest.stepping_s, 3) if slowest.stepping_s > 0 else None,
        last_step_s=age_s(now, min(last_steps) / 1e9) if last_steps else None,
        saved_step=saved.saved_step if saved is not None else None,
        saved_s=age_s(now, saved.saved_ns / 1e9) if saved is not None else None,
    )


def after(before: NodeReport, report: NodeReport, later_s: float) -> NodeReport:
    """Return a report with what it lacks from the one before: between two rounds the last step and checkpoint still count."""
    if report.step is None and before.step is not None:
        last_step_s = before.last_step_s + later_s if before.last_step_s is not None else None
        report = replace(report, step=before.step, last_step_s=last_step_s)
    if report.total_steps is None:  # in a new round the script has not reported it yet
        report = replace(report, total_steps=before.total_steps)
    if report.saved_step is None and before.saved_step is not None:
        report = replace(report, saved_step=before.saved_step, saved_s=(before.saved_s or 0.0) + later_s)
    return report


class Points:
    """Goodput over time, in at most MAX_POINTS points however long the job runs."""

    def __init__(self) -> None:
        self._points: list[tuple[float, tuple[StateSeconds, ...]]] = []
        self._every_s = POINT_S

    def __len__(self) -> int:
        return len(self._points)

    def add(self, goodput: tuple[StateSeconds, ...], now: float) -> None:
        """Keep a point if one is due."""
        if not goodput or (self._points and now - self._points[-1][0] < self._every_s):
            return
        self._points.append((now, goodput))
        if len(self._points) > MAX_POINTS:
            del self._points[1::2]
            self._every_s *= 2

    def ages(self, now: float) -> tuple[job_status.GoodputPoint, ...]:
        return tuple(job_status.GoodputPoint(age_s(now, at), goodput) for at, goodput in tuple(self._points))


class OwnNode:
    """This node. The agent's loop notes states, places and ends of rounds here, which costs the loop nothing."""

    def __init__(self, handler: Rendezvous, metrics: AgentMetrics) -> None:
        self.place = NodePlace()
        self.on_state: Callable[[], None] = lambda: None  # called by the loop when its state has changed; it must return at once
        self.read_gauges: Callable[[], Mapping[str, float]] = dict  # of the script of rank 0, if it is on this node
        self._found: dict[str, Callable[[NodeReport], NodeReport]] = {}  # by feature
        self._handler, self._metrics = handler, metrics
        self._history, self._points = RoundHistory(), Points()
        self._lock = threading.Lock()
        self._last: tuple[float, NodeReport] | None = None  # the last report with steps or a checkpoint, and when
        metrics.on_state = self._entered

    def _entered(self, state: str, at: float) -> None:
        with self._lock:
            self._history.entered(state, self._handler.part.round, at)
        self.on_state()

    def round_ended(self, why: str) -> None:
        with self._lock:
            self._history.explain(self._handler.part.round, why)

    def found(self, feature: str, fill: Callable[[NodeReport], NodeReport], news: bool) -> None:
        """Note how a feature fills this node's reports from now on. news: report it soon. Any thread may call this."""
        with self._lock:
            self._found[feature] = fill
        if news:
            self.on_state()

    def now(self, now: float) -> Own:
        """Return what it knows at `now`."""
        report = own_report(self._handler.node.host, self._metrics, self.place, self._handler.part.round, now)
        spent = self._metrics.goodput.job()
        gauges = job_status.gauges_of(self.read_gauges())
        with self._lock:
            # Not before the first round: until then nothing is known of what the job has spent before this agent.
            if self._points or self._metrics.state == families.RUNNING:
                self._points.add(spent.spent.seconds, now)
            if self._last is not None:
                report = after(self._last[1], report, max(0.0, now - self._last[0]))
            if report.step is not None or report.saved_step is not None:
                self._last = now, report
            spans = self._history.spans(now)
            report = replace(report, rounds=spans, gauges=gauges)
            for fill in self._found.values():
                report = fill(report)
            return Own(self._handler.node.id, report, spent, self._points.ages(now), self.place.nodes, self.place.world)


class Serving:
    """The server of one agent, and the file by which Prometheus finds it."""

    def __init__(
        self, shown: pages.Pages, settings: Settings, labels: Mapping[str, str], wakeup: Wakeup, alone: bool = True
    ) -> None:
        """labels: of the target for Prometheus. wakeup: signals wake it. alone: the job runs on this machine only."""
        self._linger_s, self._wakeup = settings.metrics_linger, wakeup
        self._last_scrape = pages.LastScrape()
        self._unannounce: Callable[[], None] = lambda: None
        self.lingers = False  # whether `close` waits for a last scrape
        assert settings.metrics_port is not None, "nothing is served"
        # The user must see a port that the kernel chose, and torchrun shows only warnings.
        announce = logging.WARNING if settings.metrics_port == 0 else logging.INFO
        tls = server_tls.of_settings(settings)
        self._server = server.MetricsServer(
            self._last_scrape.noting(shown), settings.metrics_host, settings.metrics_port, announce, tls
        )
        self.url = self._server.url  # address of the metrics; None if they are not served
        if settings.metrics_discovery_dir is not None and self._server.endpoint is not None:
            all_labels = {**labels, **({"__scheme__": "https"} if tls is not None else {})}
            if not alone and is_loopback(bound := self._server.endpoint[0]):
                logger.warning(
                    "metrics: the file in %s names %s, where only a Prometheus on this host finds this agent; for one elsewhere "
                    "set metrics_host=0.0.0.0",
                    *(settings.metrics_discovery_dir, bound),
                )
            self._unannounce = server.announce(settings.metrics_discovery_dir, self._server.endpoint, all_labels)

    def ended(self) -> None:
        """Note that what is served from now on is the last."""
        self._last_scrape.ended_at = time.monotonic()

    def close(self) -> Sequence[int]:
        """Serve no more, if need be after a last scrape. Return the signals that came meanwhile; they have done nothing."""
        try:
            return self._last_scrape.wait(self._linger_s, self._wakeup) if self.lingers else ()
        finally:
            self._unannounce()
            self._server.close()


class FeatureMetrics(families.FamilyCollector):
    """What features measure. The names of those that are off are there, too."""

    table: ClassVar = {name: family for row in FEATURES for name, family in row.metrics.items()}

    def show(self, **values: Mapping[families.Labels, float]) -> None:
        """Show these series of each of these families, and no others."""
        with self._lock:
            self._values |= {f"elastic_ext_{name}": dict(series) for name, series in values.items()}


class Observation(companion.Companion):
    """Shows what happens, from construction to `close`."""

    def __init__(
        self,
        metrics: AgentMetrics,
        settings: Settings,
        handler: Rendezvous,
        wakeup: Wakeup,
        on_outage: Callable[[OutageChange], None],
    ) -> None:
        """wakeup: signals wake it. on_outage: see `EtcdHealth`."""
        self._metrics, self._settings, self._handler = metrics, settings, handler
        self.goodput = metrics.goodput  # where the time goes
        self.goodput.share_with(handler.share_goodput)
        self.verdicts = VerdictMetrics(handler.node.host, settings.refuse_node)  # counts them, and hangs
        self.of_features = FeatureMetrics()
        metrics.registry.register(self.verdicts)
        metrics.registry.register(self.of_features)
        self._decided = 0  # the last round with a verdict
        etcd = EtcdHealth(settings.lease_ttl * OUTAGE_SHARE, on_outage)
        if (lease_until := handler.observe_etcd(etcd)) is not None:
            etcd.lease_until = lease_until
            metrics.registry.register(etcd)
        self.node = OwnNode(handler, metrics)  # as the status shows it
        self.node.read_gauges = lambda: self.gauges(0)
        self._last_rows: Sequence[WorkerProgress] = ()  # of the workers, at the end of the last round
        self._job: JobView | None = None
        self._serving: Serving | None = None
        if settings.metrics_port is None:
            return
        self._job = job = JobView(handler, self.node)
        shown = pages.of_agent(metrics.registry, metrics.not_ready, metrics.status, job.document)
        try:
            self._serving = Serving(shown, settings, metrics.labels, wakeup, alone=is_loopback(handler.node.address))
        except BaseException:
            job.close(0.0)
            raise

    @property
    def url(self) -> str | None:
        """Address of the metrics; None if they are not served."""
        return self._serving.url if self._serving is not None else None

    def gauges(self, rank: int) -> Mapping[str, float]:
        """Return what the script of this rank reports, if it is on this node: in this round, or at the end of the last one."""
        rows = self._metrics.progress() or self._last_rows
        return next((dict(each.row.gauges) for each in rows if each.rank == rank), {})

    def workers_ended(self, workers: companion.LocalWorkers) -> None:
        self.node.now(time.monotonic())  # how far they came: their progress table can still be read
        self._last_rows = workers.rows()

    def joined(self, group: WorkerGroup, round_: int, resumed_at: int | None) -> None:
        """Show this node's place in the round that it has joined. resumed_at: step that it starts from; None if unknown."""
        self._metrics.round_started(round_, group.workers[0].world_size)
        first, workers = group.workers[0], group.spec.local_world_size
        sizes = group.group_world_size, first.world_size
        self.node.place = NodePlace(group.group_rank, first.global_rank, workers, resumed_at, *sizes)

    def decided(self, verdict: JobVerdict, here: Decision) -> None:
        """Count a failure and the verdict of the job on it. here: the decision for this node."""
        self._metrics.failed(here.kind)
        self._count(verdict)

    def heard(self, verdict: JobVerdict) -> None:
        """Log and count a verdict after which the job goes on, if only other nodes have failed."""
        if verdict.round != self._decided and not verdict.ends_job:
            own = self._handler.node.id
            logger.warning("%s", verdicts.line_elsewhere(verdict, verdict.for_node(own, self._settings.exit_codes), own))
        self._count(verdict)

    def _count(self, verdict: JobVerdict) -> None:
        """Count a verdict of the job; a second time it changes nothing."""
        self._decided = verdict.round
        self._metrics.budget(verdict.restarts, verdict.limit)
        decision = verdict.decision
        self.verdicts.decided(verdict.round, decision.word, decision.kind, verdict.host)

    def acts(self, since: float | None) -> None:
        """Note that the agent acts on a failure here now. since: when it began, monotonic; None if that is unknown."""
        if since is not None:
            self._metrics.phase(families.DETECT, max(0.0, time.monotonic() - since))

    def linger_at_close(self) -> None:
        """Let `close` wait for a last scrape, if the user wants that. Leaves the job first: no other node waits for this one."""
        if self._settings.metrics_linger == 0 or self._serving is None or self.url is None:
            return
        try:
            self._handler.shutdown()  # as torch would next
        except SignalException:
            raise
        except Exception as error:  # noqa: BLE001 - torch tries again, and the result of the job matters more
            logger.warning("metrics_linger: no wait for a last scrape, because this agent could not leave the job: %s", error)
            return
        self._serving.lingers = True

    def show_last(self, left_s: float) -> None:
        """Show what the agent has counted last. It may be called again if there is more. left_s: to report it to the job."""
        self._metrics.enter(families.ENDED)
        if self._job is not None:
            self._job.close(left_s, last_look=self._settings.metrics_linger > 0)
        if self._serving is not None:
            self._serving.ended()

    def close(self) -> None:
        """Show no more, if need be after a last scrape; see `linger_at_close`.

        A signal ends that wait. In a launcher it does no more: the job is over, and so is what decides the exit code. A program
        that has started the job gets it again, as if there had been no wait: from torch's handler that is a SignalException.
        """
        received = self._serving.close() if self._serving is not None else ()
        if self._job is not None:
            self._job.close(0.0)
        if not exits.is_launcher():
            for number in received:
                signal.raise_signal(number)
