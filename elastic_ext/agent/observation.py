"""What an agent shows of itself, its workers and its job: metrics and pages."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing import SignalException

import elastic_ext
from elastic_ext.agent import exits, report
from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.agent.goodput import AccountedMetrics
from elastic_ext.agent.job_view import JobView
from elastic_ext.agent.last_words import LEAST_S
from elastic_ext.agent.own_node import Place
from elastic_ext.agent.serving import Serving
from elastic_ext.base.settings import Settings
from elastic_ext.base.wakeup import Wakeup
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.failures.policy import Decision
from elastic_ext.observe import families, pages
from elastic_ext.observe.collectors import EtcdHealth, GoodputCollector, Incidents, Outage
from elastic_ext.observe.metrics import GpuQuery, WorkerProgress, gpu_uuids, gpus_by_local_rank
from elastic_ext.observe.prometheus_files import TextFile
from elastic_ext.observe.script_metrics import ScriptMetrics
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.rendezvous.run_id import host_name
from elastic_ext.workers.standby.rules import ColdReason

logger = logging.getLogger(__name__)

OUTAGE_SHARE = 0.5  # of lease_ttl: when that has passed without an answer, this node may soon be taken for lost


def make_metrics(
    settings: Settings, run_id: str, workers: int, progress: Callable[[], Sequence[WorkerProgress]]
) -> AccountedMetrics:
    """Return this agent's metrics. workers: on this node. progress: see AgentMetrics."""
    metrics = AccountedMetrics(
        version=elastic_ext.__version__,
        torch=torch.__version__,
        run_id=run_id,
        node=host_name(settings),
        cold_reasons=[each.value for each in ColdReason],
        gpus=GpuQuery(lambda: gpus_by_local_rank(workers, gpu_uuids(), os.environ)).answer,
        progress=progress,
    )
    metrics.registry.register(GoodputCollector(metrics.goodput.look, metrics.goodput.job))
    return metrics


class Observation(Companion):
    """Shows what happens, from construction to `close`.

    Attributes:
        goodput: where the time goes.
        url: address of the metrics; None if they are not served.
    """

    def __init__(
        self,
        metrics: AccountedMetrics,
        settings: Settings,
        handler: Rendezvous,
        wakeup: Wakeup,
        on_outage: Callable[[Outage], None],
    ) -> None:
        """wakeup: signals wake it. on_outage: see `EtcdHealth`."""
        self._metrics, self._settings, self._handler = metrics, settings, handler
        self.goodput = metrics.goodput
        self.goodput.share_with(handler.share_goodput)
        self._incidents = Incidents(handler.host, settings.refuse_node)
        metrics.registry.register(self._incidents)
        handler.on_verdict = self._heard
        self._decided = 0  # the last round with a verdict
        etcd = EtcdHealth(settings.lease_ttl * OUTAGE_SHARE, on_outage)
        if (lease_until := handler.observe_etcd(etcd)) is not None:
            etcd.lease_until = lease_until
            metrics.registry.register(etcd)
        self._scripts: ScriptMetrics | None = None
        self._job: JobView | None = None
        self._serving: Serving | None = None
        self._file: TextFile | None = None
        if settings.metrics_file is not None:
            self._file = TextFile(settings.metrics_file, metrics.registry, {**metrics.labels, "pid": str(os.getpid())})
        if not settings.metrics:
            return
        self._job = job = JobView(handler, metrics)
        shown = pages.of_agent(metrics.registry, metrics.not_ready, metrics.status, job.document)
        try:
            self._serving = Serving(shown, settings, metrics.labels, wakeup)
        except BaseException:
            job.close(0.0)
            raise

    @property
    def url(self) -> str | None:
        return self._serving.url if self._serving is not None else None

    def read_scripts(self, run_dir: str) -> None:
        """Show the metrics that the scripts define, too, from files in the agent's private directory. Call this once."""
        if not self._settings.metrics and self._settings.metrics_file is None:
            return
        try:
            self._scripts = ScriptMetrics(os.path.join(run_dir, "metrics"))
            self._metrics.registry.register(self._scripts)
        except OSError as error:
            logger.warning("metrics of scripts are not shown: %s", error)

    def message(self, round: int, local_rank: int, rank: int) -> dict[str, object]:
        """Return what a worker of the round that begins has to know; see workers.worker_env."""
        return self._scripts.message(round, local_rank, rank) if self._scripts is not None else {}

    def gauges(self, rank: int) -> Mapping[str, float]:
        """Return what the script of this rank shows of itself, if it is on this node; see `ScriptMetrics.gauges`."""
        return self._scripts.gauges(rank) if self._scripts is not None else {}

    def check(self, workers: LocalWorkers) -> None:
        if self._scripts is not None:
            self._scripts.look()

    def workers_ended(self, workers: LocalWorkers) -> None:
        if self._job is not None:
            self._job.workers_ended()  # their progress table can still be read
        if self._scripts is not None:
            self._scripts.round_ended()

    def joined(self, group: WorkerGroup, round_: int, resumed_at: int | None) -> None:
        """Show this node's place in the round that it has joined. resumed_at: step that it starts from; None if unknown."""
        self._metrics.round_started(round_, group.workers[0].world_size)
        if self._job is not None:
            first, workers = group.workers[0], group.spec.local_world_size
            sizes = group.group_world_size, first.world_size
            self._job.joined(Place(group.group_rank, first.global_rank, workers, resumed_at, *sizes))

    def round_ended(self, why: str) -> None:
        """Show why a round is over."""
        if self._job is not None:
            self._job.round_ended(why)

    def decided(self, verdict: JobVerdict, here: Decision) -> None:
        """Count a failure and the verdict of the job on it. here: the decision for this node."""
        self._metrics.failed(here.kind)
        self._count(verdict)

    def _heard(self, verdict: JobVerdict) -> None:
        """Log and count a verdict after which the job goes on, if only other nodes have failed."""
        if verdict.round != self._decided and not verdict.ends_job:
            own = self._handler.node_id
            logger.warning("%s", report.line_elsewhere(verdict, verdict.for_node(own), own))
        self._count(verdict)

    def _count(self, verdict: JobVerdict) -> None:
        """Count a verdict of the job; a second time it changes nothing."""
        self._decided = verdict.round
        self._metrics.budget(verdict.restarts, verdict.limit)
        decision = verdict.decision
        self._incidents.decided(verdict.round, decision.word, decision.kind, verdict.host)

    def acts(self, since: float | None) -> None:
        """Note that the agent acts on a failure here now. since: when it began, monotonic; None if that is unknown."""
        if since is not None:
            self._metrics.phase(families.DETECT, max(0.0, time.monotonic() - since))

    def hung(self) -> None:
        """Count a hang of the job."""
        self._incidents.hung()

    def linger_at_close(self) -> None:
        """Let `close` wait for a last scrape, if the user wants that. Leaves the job first: nobody may wait for this node."""
        if self._settings.metrics_linger == 0 or self._serving is None or self.url is None:
            return
        try:
            self._handler.shutdown()  # as torch would next
        except SignalException:
            raise
        except Exception as error:  # noqa: BLE001 - torch tries again, and the result of the job matters more
            logger.warning("metrics: no wait for a last scrape (metrics_linger): the job could not be left: %s", error)
            return
        self._serving.lingers = True

    def show_last(self, left_s: float) -> None:
        """Leave what the agent has counted last. It may be called again if there is more.

        left_s: for `metrics_file` to be written, and beside that for the job to hear of it.
        """
        by = time.monotonic() + left_s
        self._metrics.enter(families.ENDED)
        if self._file is not None:
            self._file.begin()
        if self._job is not None:
            self._job.close(left_s, last_look=self._settings.metrics_linger > 0)
        if self._serving is not None:
            self._serving.ended()
        if self._file is not None:
            self._file.wait(max(LEAST_S, by - time.monotonic()))

    def close(self) -> None:
        """Show no more, if need be after a last scrape; see `linger_at_close`.

        A signal ends that wait. In a launcher it does no more: the job is over, and so is what decides the exit code. A program
        that has started the job gets it again, as if nobody had waited: from torch's handler that is a SignalException.
        """
        told = self._serving.close() if self._serving is not None else ()
        if self._job is not None:
            self._job.close(0.0)
        if not exits.is_launcher():
            for number in told:
                signal.raise_signal(number)
