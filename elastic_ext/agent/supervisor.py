"""The agent: a LocalElasticAgent whose loop waits for events, asks what a failure means, and carries out the decision.

A worker ends -> evidence -> classify -> decide -> restart in a new round, or give up with the reason.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.metrics import put_metric
from torch.distributed.elastic.multiprocessing import LogsSpecs, ProcessFailure, SignalException

import elastic_ext
from elastic_ext.agent import exits, launch, postmortem, report, saves
from elastic_ext.agent.report import FailedWorker
from elastic_ext.agent.saves import SaveOnDemand
from elastic_ext.base import kinds
from elastic_ext.base import settings as settings_module
from elastic_ext.base.errors import BadCheckpoints, RoundOver, UsageError, usage_errors_exit
from elastic_ext.base.printable import Block, printable, redacted
from elastic_ext.base.torch_private import TorchAgent, raise_again, started_by
from elastic_ext.base.wakeup import Wakeup, readable
from elastic_ext.checkpoints.choice import discovery, resolution
from elastic_ext.checkpoints.choice.resolution import Place, Resumption
from elastic_ext.checkpoints.copying import copier
from elastic_ext.checkpoints.copying.copier import Copier
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.directory.pins import Pin
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.failures import ledger, policy, user_rules
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.host import Host
from elastic_ext.failures.ledger import JobStopped
from elastic_ext.failures.matching import ASKED
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.failures.sources import deletion_grace_s
from elastic_ext.observe.metrics import AgentMetrics, WorkerProgress, bridge_torchelastic
from elastic_ext.observe.server import MetricsServer
from elastic_ext.rendezvous.handler import EndKind, Rendezvous
from elastic_ext.workers import descriptors
from elastic_ext.workers.hangs import detector, stacks
from elastic_ext.workers.hangs.detector import Stuck
from elastic_ext.workers.hangs.flight_recorder import FlightRecorder
from elastic_ext.workers.hangs.watch import HangWatch
from elastic_ext.workers.logs import WorkerLogs
from elastic_ext.workers.processes import WorkerProcesses
from elastic_ext.workers.progress import Leaving, ProgressTable
from elastic_ext.workers.reaper.client import Reaper
from elastic_ext.workers.standby.pool import StandbyPool
from elastic_ext.workers.standby.rules import ColdReason
from elastic_ext.workers.stderr.tails import StderrTails
from elastic_ext.workers.wake_pipe import WakePipe

logger = logging.getLogger(__name__)

MEMBERSHIP = "membership"  # kind of a restart that no failure caused
KERNEL_SLEEP_LOOK_S = 1.0  # how often torch's check for workers asleep in the kernel runs, where the user turned it on
# Of descriptors, processes, memory, room for files: some other host may have what this one has not.
SCARCE = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC)
PLATFORM_S = 2.0  # that the platform has to say why the agent was told to stop
SHOWN_STACKS = 4000  # characters; the rest is in the file
STACKS_KEPT = 1000  # for the verdict, of the end: the main thread comes last


class Supervisor(TorchAgent):
    """Supervises the workers of one node.

    Invariants: the restart count that workers see only grows and is no budget; a membership change is never charged; whatever
    makes the agent give up, its result is FAILED.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, *args: Any, **kwargs: Any) -> None:
        self._handler: Rendezvous = cast("Rendezvous", spec.rdzv_handler)  # see OneShot: it is one of ours
        self._settings: settings_module.Settings = self._handler.settings
        self._logs = WorkerLogs(logs_specs)
        with usage_errors_exit():
            self._rules = user_rules.load(self._settings.rules)
            copier.check(self._settings)
            # Before the run: what ends that closes the job for all nodes.
            self._extras = launch.extras_fit(spec.local_world_size, descriptors.left())
            os.rmdir(launch.make_run_dir(spec.local_world_size))
            super().__init__(launch.prepare(spec, self._settings), self._logs, *args, **kwargs)
            settings_module.check_times(self._settings, self._handler.torch_conf, self.shutdown_timeout_s)
        self._grace_s = settings_module.stop_grace(self._settings, self.shutdown_timeout_s)
        limit = self._settings.max_restarts
        self._max_restarts = self.spec.max_restarts if limit is None else limit
        self._handler.attached = True
        self._handler.prepare(self.spec, self._max_restarts, self._newest_checkpoint)
        self._resumed = Resumption(step=None)  # what this round started from
        self._stacks: list[str] = []  # of this round's workers that did not end when they were told to
        self._token = secrets.token_hex(16)
        self._metrics = AgentMetrics(
            version=elastic_ext.__version__, torch=torch.__version__, run_id=self._handler.get_run_id(), progress=self._progress
        )
        self._metrics_url: str | None = None
        self._introduced = False
        self._processes: WorkerProcesses | None = None
        self._board: ProgressTable | None = None
        self._leaving: Leaving
        self._cold = ColdReason.LACKING  # why there are no standbys
        self._warm: set[int] = set()  # local ranks of this round that standbys have taken
        self._watch: HangWatch | None = None
        self._flight: FlightRecorder | None = None
        self._hung: dict[int, Stuck] = {}  # by local rank, those of this round that the others waited for
        self._saves: SaveOnDemand | None = None
        self._copier: Copier | None = None
        self._pin: Pin | None = None  # of what the workers are loading
        self._leave_by: float | None = None  # when the platform kills this agent, monotonic; None: it was not told to leave
        self._wakeup: Wakeup
        self._news: WakePipe
        self._reaper: Reaper
        self._stderr: StderrTails
        self._host: Host
        self._standbys: StandbyPool | None = None

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the job on this node; see torch's agent. Nothing that was started here is alive after it, unless it ended well."""
        exits.use(self._settings.exit_codes)
        with ExitStack() as stack:
            stack.enter_context(descriptors.raised())
            if not self._extras:
                logger.warning("few files may be opened here: no warm standbys, and nothing of the workers' stderr is kept")
            self._wakeup = stack.enter_context(Wakeup())
            self._handler.on_event = self._wakeup.set
            self._handler.on_wait = lambda: raise_again(self._wakeup.signals())
            if self._settings.metrics:
                host, port = self._settings.metrics_host, self._settings.metrics_port
                # A port that nobody chose must be seen, and torchrun shows warnings only.
                announce = logging.WARNING if port == 0 else logging.INFO
                server = MetricsServer(self._metrics.registry, host, port, announce)
                stack.callback(server.close)
                self._metrics_url = server.url
            stack.enter_context(bridge_torchelastic(self._metrics))
            self._logs.run_dir = launch.make_run_dir(self.spec.local_world_size)
            stack.callback(shutil.rmtree, self._logs.run_dir, ignore_errors=True)
            stack.callback(self._logs.remove)
            self._news = WakePipe(os.path.join(self._logs.run_dir, "news"))
            stack.callback(self._news.close)
            self._stderr = self._logs.stderr = StderrTails(
                self._extras and self._settings.stderr_tail and self._settings.bootstrap
            )
            stack.callback(self._stderr.close)
            self._host = Host(self._settings)
            stack.callback(self._host.close)
            self._reaper = Reaper(self._token, self._logs.run_dir)
            self._standbys = self._make_standbys() if self._extras else None
            if self._settings.hang and torch.distributed.is_nccl_available():
                self._flight = FlightRecorder(self._logs.run_dir, os.environ)
                stack.callback(self._flight.close)
            self._copier = copier.start(self._settings, self._token, self._metrics)
            clean = False
            try:
                result = super().run(role)
                clean = result is not None and not result.is_failed()
            except SignalException as error:
                self._asked_to_stop(error)
                # The job is not closed: the others form a round without this node, at once instead of when its lease expires.
                self._handler.leave()
                raise
            finally:
                self._handler.on_event = self._handler.on_wait = lambda: None
                self._forget_round()
                if self._standbys is not None:
                    self._standbys.close()
                left: tuple[str, ...] = ()
                try:
                    if self._copier is not None:  # before the guard, which would end it
                        left = self._copier.close(None if self._leave_by is None else max(0.0, self._leave_by - time.monotonic()))
                finally:  # a signal has ended the wait, too
                    self._reaper.close(clean)
            return self._not_delivered(left) if clean and left else result

    def _not_delivered(self, left: tuple[str, ...]) -> RunResult:
        """All was trained, and what was saved last is on this node only. Started again here, the agent copies it."""
        reason = f"training is done, but {', '.join(left)} could not be copied to checkpoint_dir and is on this node only"
        verdict = self._stop(kinds.STORAGE, reason, policy.EX_TRY_AGAIN, "not-copied")
        logger.error("elastic_ext: %s; exit code %s", printable(reason), verdict.decision.exit_code)
        return RunResult(WorkerState.FAILED, failures=self._told(verdict, verdict.decision, report.failure_elsewhere(verdict)))

    def _make_standbys(self) -> StandbyPool | None:
        """Before the first rendezvous: while that is under way they import what workers need."""
        wanted = launch.standbys(self.spec, self._settings, self._token)
        if isinstance(wanted, str):
            logger.info("no warm standbys: %s", wanted)
            self._cold = ColdReason.OFF
            return None
        try:
            return StandbyPool(wanted, self._logs.run_dir, self._metrics.worker_started, self._metrics.standbys)
        except (OSError, RuntimeError) as error:  # no descriptor, no thread
            self._cold = ColdReason.LACKING
            logger.warning("no warm standbys: they could not be started: %s", error)
            return None

    def _asked_to_stop(self, error: SignalException) -> None:
        """Somebody has signalled the agent. Who, and so the exit code, is for the platform to say where it can."""
        if exits.of_verdict() is not None:
            return  # the job had ended before
        self._host.ask()
        evidence = Evidence(
            rank=-1, agent_signal=error.sigval.name, node=self._handler.host, platform=self._host.says(PLATFORM_S).platform
        )
        diagnosis = classify(evidence)
        if diagnosis.tier == ASKED:
            decision = policy.decide(diagnosis, exit_codes=self._settings.exit_codes)
            self._told(ledger.JobVerdict(decision, self._handler.round, self._handler.node_id, self._handler.host), decision, {})

    # The loop.

    def supervise(self) -> RunResult:
        try:
            with usage_errors_exit():
                self.first_round()
                return self._supervise()
        except JobStopped as stopped:
            return self._stopped_elsewhere(stopped.verdict)
        except BadCheckpoints as error:
            return self._stopped_elsewhere(self._stop(kinds.STORAGE, str(error), policy.EX_CODE, "no-checkpoint-left"))
        except OSError as error:
            if error.errno not in SCARCE:
                raise
            reason = f"this host lacks what the next round needs: {error}"
            self._handler.leave()  # the others go on without it
            return self._stopped_elsewhere(self._stop(kinds.UNKNOWN, reason, policy.EX_TRY_AGAIN, "host-exhausted"))
        except SignalException as error:
            grace_s = self._left_s()
            self._leave_by = time.monotonic() + grace_s
            self._save_first(error.sigval, grace_s)
            self._handler.leaving(f"{error.sigval.name}, sent to its agent")
            raise

    def _supervise(self) -> RunResult:
        while True:
            self._await_news()
            result = self._look()
            self.group.state = result.state
            put_metric(f"workers.{self.spec.role}.remaining_restarts", self.remaining_restarts)
            put_metric(f"workers.{self.spec.role}.{result.state.name.lower()}", 1)

            if result.state is WorkerState.SUCCEEDED:
                self._count_workers("succeeded")
                if self.all_nodes_finished():
                    self._handler.finished()
                    return result
                self._restart(MEMBERSHIP)
                continue
            if result.state is WorkerState.HEALTHY:
                if self._saves is not None:
                    self._saves.look(self._handler)
                self._look_for_hangs()
                if self._copier is not None and self._board is not None:
                    words = self._board.read_all()
                    self._copier.saved(sum(word.saves for word in words))
                    if any(word.steps or word.saves for word in words):  # loading is collective: all have
                        self._unpin()
                if (over := self._handler.round_over()) is None:
                    continue
                logger.warning("elastic_ext: round %s is over: %s; all workers are stopped", self._handler.round, over)
                hangs = over.kind is EndKind.STALLED and self._watch is not None and self._watch.stalled
                if hangs:
                    self._end_hung()
                self._end_workers()
                if not hangs and not postmortem.failed_by_itself(self._workers.exits, self._logs.error_files):
                    self._restart(MEMBERSHIP)
                    continue
                self._host.ask()
                result = self.close_failed()
            if result.state is WorkerState.UNKNOWN:  # torch has lost track of the processes; ours are still in view
                self._end_workers()
            self._stderr.settle()
            cause, others = postmortem.cause_and_others(self._failed_workers(result))
            verdict = self._conclude(result, cause)
            decision = verdict.for_node(self._handler.node_id)
            logger.error("%s", report.block(cause, others, verdict, decision, self._handler.node_id))
            self._metrics.failed(decision.kind)
            if decision.action is Action.STOP:
                self._count_workers("failed")
                self.group.state = WorkerState.FAILED
                failures = report.process_failures(cause, others)
                return RunResult(WorkerState.FAILED, failures=self._told(verdict, decision, failures))
            if decision.charged:
                self.charge_restart()
            if decision.cold and self._standbys is not None:
                self._standbys.rest("the last round failed before its first step")
            if decision.checkpoints_back and verdict.node == self._handler.node_id:
                self._put_aside(decision)
            self._pause(decision.delay_s)
            self._restart(decision.kind)

    def _stopped_elsewhere(self, verdict: ledger.JobVerdict) -> RunResult:
        """The job has ended because of what happened on another node."""
        self._end_workers()
        self._count_workers("failed")
        logger.error("%s", report.from_elsewhere(verdict))
        self._metrics.failed(verdict.decision.kind)
        self.group.state = WorkerState.FAILED
        return RunResult(WorkerState.FAILED, failures=self._told(verdict, verdict.decision, report.failure_elsewhere(verdict)))

    def _stop(self, kind: str, reason: str, code: int, rule: str) -> ledger.JobVerdict:
        """What this node decides by itself, where no worker's failure is judged. code: of the preset "design"."""
        decision = Decision(Action.STOP, kind, reason, policy.exit_code_for(code, self._settings.exit_codes), rule)
        return ledger.JobVerdict(decision, self._handler.round, self._handler.node_id, self._handler.host)

    def _told(self, verdict: ledger.JobVerdict, decision: Decision, failures: dict[int, ProcessFailure]) -> exits.Failures:
        """Say the verdict where schedulers look, before any agent leaves."""
        code = decision.exit_code or policy.EX_FAILED  # never 0: the job has not finished
        exits.decided(code)
        exits.tell(json.loads(ledger.encode_verdict(verdict)), self._settings.verdict_file)
        return exits.Failures(failures, code)

    def _await_news(self) -> None:
        """Block until a worker ends, a function entrypoint returns, the reaper dies, a signal arrives, or a look is due."""
        looks = [self._handler.poll_interval_s] if self._handler.poll_interval_s else []
        if self.watches_kernel_sleep:
            looks.append(KERNEL_SLEEP_LOOK_S)
        if self._watch is not None:
            looks.append(self._watch.next_look_s())
        reaper_fd = [self._reaper.pidfd] if self._reaper.pidfd is not None else []
        self._workers.wait(min(looks, default=None), self._wakeup, self._news, *reaper_fd, *self.result_readers)
        raise_again(self._wakeup.clear())  # before the look, not before the wait: what comes in between must end the next wait
        self._news.clear()
        if self._standbys is not None:
            self._standbys.learn(self._logs.modules_file)
        self._reaper.revive()

    def _pause(self, seconds: float) -> None:
        """Before a restart: nothing to do meanwhile. A signal ends it by its exception."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            readable(self._wakeup, left_s)
            raise_again(self._wakeup.clear())

    def _look(self) -> RunResult:
        """Return the state of the worker group. If one worker has failed, all have been stopped when this returns."""
        if self._workers.failed or self._leaving.codes():
            self._handler.break_round(f"workers failed on {self._handler.host}")  # first: the others' workers wait in collectives
            self._host.ask()
            self._end_workers()
            return self.close_failed()
        if self.result_readers or not self._workers.running:
            result = self.reap()
            self._workers.look()
            return result
        asleep = self.asleep_in_kernel()
        if asleep is not None:
            self._end_workers()
            return asleep
        return RunResult(WorkerState.HEALTHY)

    # What happened, and what to do.

    def _failed_workers(self, result: RunResult) -> list[FailedWorker]:
        ended = postmortem.Round(
            node=self._handler.host,
            host=self._host.says(),
            pids=self._workers.pids,
            ranks=self._ranks,
            exits=self._workers.exits,
            error_files=self._logs.error_files,
            stderr=self._stderr,
            board=self._board,
            warm=self._warm,
            hung=self._hung,
            torch_failures=result.failures,
            all_asked=result.state is WorkerState.UNHEALTHY,
        )
        return postmortem.failed_workers(ended, self._rules)

    def _conclude(self, result: RunResult, cause: FailedWorker) -> ledger.JobVerdict:
        """What to do, for the whole job."""
        if result.state is WorkerState.UNHEALTHY:
            reason = "a worker slept in the kernel for longer than the limit; this host may need a restart"
            return self._stop(kinds.HARDWARE, reason, policy.EX_NODE, "kernel-sleep")
        with self._phase("verdict"):
            share = ledger.MOST_STACKS // max(1, len(self._stacks)) - 1  # each has its beginning in the report
            where = "\n".join(stack[:share] for stack in self._stacks)
            told = ledger.Report(self._handler.host, cause.diagnosis, self._resumed_at, where, redacted(self._resumed.path))
            verdict: ledger.JobVerdict = self._handler.conclude(told)
        return verdict

    # Hangs.

    def _look_for_hangs(self) -> None:
        """Claim that all workers of this node stall, or take the claim back; it hangs when all nodes claim so."""
        if self._watch is None:
            return
        before, expected = self._watch.stalled, self._watch.imminent
        verdict = self._watch.look({local_rank: self._workers.pids[local_rank] for local_rank in self._workers.running})
        if verdict is None:
            return
        asks = self._board is not None and all(word.asks_for_saves for word in self._board.read_all())
        if verdict.imminent and not expected and asks:
            logger.info("a checkpoint is asked for, the workers may hang: %s", verdict.reason)
            self._handler.request_save(f"the workers on {self._handler.host} may hang")
        if verdict.stalled or before:
            self._handler.stalled(verdict.stalled)
        if verdict.stalled != before:
            logger.warning("elastic_ext: %s%s", "" if verdict.stalled else "the workers go on: ", verdict.reason)

    def _end_hung(self) -> None:
        """Ask the workers where they are, then kill them: who waits for what will not come cannot end in its own way."""
        assert self._watch is not None
        running = {local_rank: self._workers.pids[local_rank] for local_rank in self._workers.running}
        stuck = self._watch.examine(running, self._logs.stacks_files)
        behind = detector.culprits(list(stuck.values()))
        self._hung = {local_rank: each for local_rank, each in stuck.items() if each in behind}
        recorded = self._flight.dump(each.rank for each in stuck.values()) if self._flight is not None else ""
        for each in sorted(stuck.values(), key=lambda one: one.blame):
            where = Block(f"; it was at:\n{each.stack[:SHOWN_STACKS]}" if each.stack else "")
            logger.warning("elastic_ext: %s%s", each.reason, where)
            self._stacks.append(f"{each.reason}\n{each.stack[-STACKS_KEPT:]}".rstrip())
        if recorded:
            logger.warning("elastic_ext: %s", recorded)
            self._stacks.append(recorded)
        self._end_workers(0.0)

    # Saves on demand.

    def _save_first(self, sigval: signal.Signals, grace_s: float) -> None:
        """The platform takes this node away: have the job save a checkpoint while there is time. Another signal ends the wait."""
        if sigval in exits.BY_HAND or self._board is None or self._processes is None or self._processes.stopped:
            return
        if self._workers.failed or not self._workers.running:
            return
        plan = saves.plan(grace_s, self._grace_s, self._board.read_all())
        if plan.wait_s <= 0:
            logger.info("%s: no checkpoint is asked for: %s", sigval.name, plan.reason)
            return
        logger.warning("%s: the job is asked for a checkpoint: %s", sigval.name, plan.reason)
        begin = time.monotonic()
        before = self._handler.save_wanted
        self._handler.request_save(f"{sigval.name} on {self._handler.host}")
        over = None
        while over is None and (left_s := begin + plan.wait_s - time.monotonic()) > 0:
            if self._workers.failed or not self._workers.running or self._handler.round_over() is not None:
                over = "the round has ended"
            elif self._handler.save_wanted > before and self._saves is not None:
                over = self._saves.look(self._handler)
            if over is None:
                self._workers.wait(left_s, self._wakeup, self._news)
                self._wakeup.clear()
                self._news.clear()
        took_s = time.monotonic() - begin
        logger.warning("the checkpoint before leaving: %s after %.2g s", over or "not there yet", took_s)
        self.shorten_shutdown(max(1.0, grace_s - took_s))

    def _left_s(self) -> float:
        settings = self._settings
        pod_grace_s = deletion_grace_s(os.environ, settings.pod_file, settings.pod_api)
        return saves.grace_s(settings.platform_grace, pod_grace_s, self.shutdown_timeout_s, os.environ, time.time())

    # Rounds.

    def _restart(self, kind: str) -> None:
        self._metrics.restarted(kind)
        self.next_round()

    def join_round(self) -> None:
        while True:
            with self._phase("rendezvous"):
                super().join_round()
            try:
                self._resumed = self._agree_on_checkpoint()
                break
            except RoundOver as over:
                logger.warning("round %s is over before its workers were started: %s", self._handler.round, over)
        self._metrics.round_started(self._handler.round, self.group.workers[0].world_size)

    def _newest_checkpoint(self) -> str | None:
        """Path of the newest complete checkpoint in `checkpoint_dir`; for the thread of the rendezvous."""
        directory = self._settings.checkpoint_dir
        if directory is None:
            return None
        newest = discovery.newest_complete(directory, discovery.Wanted(pattern=self._settings.checkpoint_pattern)).resume
        return newest.path if newest is not None else None

    def known_workers(self) -> list[Worker] | None:
        return self._handler.workers()

    def all_nodes_finished(self) -> bool:
        return self._handler.await_all_done()

    def start_workers(self) -> dict[int, Any]:
        count = self._handler.round - 1
        self._board = self._make_board(count)
        self._logs.variables = {
            "TORCHELASTIC_RESTART_COUNT": str(count),
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
            **launch.blanked_secrets(os.environ),
            "ELASTIC_EXT_LAUNCH": self._handler.launch,
            **self._resume_variables(),
            **(self._flight.variables if self._flight is not None else {}),
        }
        self._introduce()
        self._logs.tell = {slot: {"agent": self._token} for slot in range(self.spec.local_world_size)}
        store_at = self.group.master_addr, self.group.master_port
        if self._settings.bootstrap and self._board is not None:
            self._saves = SaveOnDemand(self._board, self.spec.local_world_size, self.group.group_world_size, store_at)
            for slot, told in self._logs.tell.items():
                told.update(slot=slot, progress=self._board.path, news=self._news.path, store=store_at)
        if self._standbys is not None and self._board is not None:
            self._standbys.learn(self._logs.modules_file)  # of the round before: it may have been written at the very end
            self._logs.tell[0]["modules"] = self._logs.modules_file = os.path.join(self._logs.run_dir, "modules")
        warm_start = self._standbys.start if self._standbys is not None else None
        with self._phase("start"), started_by(warm_start, descriptors.as_users):
            pids = super().start_workers()
        for pid in pids.values():  # functions, too, which torch starts in its own way
            descriptors.as_users(pid)
        if self._standbys is not None:
            released = self._standbys.round_started()
            self._warm = {local_rank for local_rank, pid in pids.items() if pid in released}
        else:
            for _ in pids:
                self._metrics.worker_started("cold", self._cold.value)
        self._processes = WorkerProcesses(pids, self.leads_groups)
        self._leaving = Leaving(self._board, pids, self._news)
        self._stacks.clear()
        self._hung = {}
        # Without the bootstrap nobody's progress is ever known: that is no sign of a hang.
        if self._settings.hang and launch.has_bootstrap(self.spec) and self._board is not None and self.leads_groups:
            self._watch = HangWatch(self._board, self._ranks, self._settings.hang_timeout)
        self._reaper.watch(pids.values(), self._handler.last_will())
        self._host.round_started(pids.values())
        self._count_workers("running")
        return pids

    def _introduce(self) -> None:
        """Once: a restart is told elsewhere. A warning, though it is none, for torchrun shows nothing else."""
        if not self._introduced:
            self._introduced = True
            backend, run_id = self._handler.get_backend(), self._handler.get_run_id()
            logger.warning("%s", launch.start_line(backend, run_id, self._metrics_url, self._settings, self._resumed))

    def _make_board(self, count: int) -> ProgressTable | None:
        """In memory if there is room, else on disk, else none: the job runs without it."""
        for directory in (self._logs.run_dir, tempfile.gettempdir()):
            try:
                return ProgressTable(os.path.join(directory, f"progress.{self._token}.{count}"), self.spec.local_world_size)
            except OSError as error:
                logger.warning("no room for the progress words in %s: %s", directory, error)
        return None

    def stop_workers(self) -> None:
        self._end_workers()
        super().stop_workers()
        self._forget_round()

    def _end_workers(self, grace_s: float | None = None) -> None:
        """Stop what still runs, within the grace; once a round. grace_s: another one, after which nobody is asked where it is."""
        if self._processes is not None and not self._processes.stopped:
            by = self._handler.stop_by()
            grace = self._grace_s if grace_s is None else grace_s
            grace = grace if by is None else min(grace, max(0.0, by - time.monotonic()))
            with self._phase("stop"):
                self._processes.stop(
                    grace,
                    lambda local_ranks: self._show_stragglers(local_ranks, grace) if grace_s is None else None,
                    leaving=self._leaving,
                )
            self._count_workers("stopped")

    def _unpin(self) -> None:
        """The workers have loaded their checkpoint, or will no more."""
        if self._pin is not None:
            self._pin.release()
            self._pin = None

    def _forget_round(self) -> None:
        self._unpin()
        if self._copier is not None:
            self._copier.look()  # for what was saved as the last thing
        if self._processes is not None:
            self._processes.close()
            self._processes = None
        if self._saves is not None:
            self._saves.close()
            self._saves = None
        self._watch = None
        if self._board is not None:
            self._board.remove()
            self._board = None

    def _agree_on_checkpoint(self) -> Resumption:
        """What this round resumes from: the same on every node. Raises RoundOver: the round ended before all knew it."""
        place = Place(self.group.group_rank, self.group.group_world_size, self.spec.local_world_size)
        pin = Pin(open_storage(self._settings.local_dir)) if self._settings.local_dir is not None else None
        try:
            resumed = resolution.agree(self._settings, self._handler.get_run_id(), self._handler.exchange, place)
            if pin is not None and resumed.local:
                pin.narrow(resumed.path.rpartition("/")[2])
                self._pin, pin = pin, None
        finally:
            if pin is not None:
                pin.release()
        return resumed

    def _resume_variables(self) -> dict[str, str]:
        """What the workers are told to resume from."""
        if self._settings.checkpoint_dir is None:
            return {}
        if self._copier is not None:
            self._copier.round_starts(self._resumed.path)
        if self._resumed.path:
            logger.info("resuming from %s, step %s (%s)", self._resumed.path, self._resumed.step, self._resumed.reason)
        else:
            logger.info("the job starts from the beginning: %s", self._resumed.reason)
        directories = {
            "ELASTIC_EXT_CHECKPOINT_DIR": self._settings.checkpoint_dir,
            tiers.LOCAL_ENV: self._settings.local_dir or "",
        }
        return {**directories, **self._resumed.variables}

    def _put_aside(self, decision: Decision) -> None:
        """The checkpoint that is blamed must be marked before the next round is sealed, and this node is part of that."""
        reason = f"{decision.kind} failure in round {self._handler.round}: {decision.rule}"
        try:
            resolution.quarantine(self._settings, self._resumed.path, decision.kind == kinds.NUMERIC, reason)
        except (UsageError, OSError) as error:
            logger.warning("the checkpoint that the failure is blamed on could not be put aside: %s", error)

    # What is shown.

    def _show_stragglers(self, local_ranks: list[int], grace_s: float) -> None:
        """Say who did not end in time, and where it was: the one moment to learn why."""
        for local_rank in local_ranks:
            pid = self._workers.pids[local_rank]
            where = ""
            if self._board is not None and self._board.read(local_rank).stacks_armed:
                where = stacks.dump(pid, self._logs.stacks_files[local_rank])
            if where:
                rank = self.group.workers[local_rank].global_rank
                self._stacks.append(f"rank {rank} did not end on SIGTERM; it was at:\n{where[-STACKS_KEPT:]}")
            logger.warning(
                "worker %s (pid %s) did not end within %.2g s of SIGTERM and is killed%s",
                local_rank,
                pid,
                grace_s,
                Block(f"; it was at:\n{where[:SHOWN_STACKS]}" if where else ""),
            )

    def _progress(self) -> list[WorkerProgress]:
        """The workers' progress words, for the metrics; called from the threads of the metrics server."""
        board, watch, now_ns = self._board, self._watch, time.monotonic_ns()  # each may be gone at the next look
        words = board.read_all() if board is not None else []
        step_s = watch.step_s if watch is not None else {}
        usual_s = statistics.median(step_s.values()) if step_s else 0.0
        return [
            WorkerProgress(
                slot,
                word.steps,
                (now_ns - word.last_step_ns) / 1e9 if word.last_step_ns else None,
                step_s.get(slot),
                step_s[slot] / usual_s if slot in step_s and usual_s > 0 else None,
                word.saved_step,
                word.failed_saves,
            )
            for slot, word in enumerate(words)
            if word.pid
        ]

    def _count_workers(self, state: str) -> None:
        self._metrics.workers(**{state: self.spec.local_world_size})

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Measure one phase of a recovery; the first start is none."""
        start = time.monotonic()
        yield
        if name == "stop" or self._handler.round > 1:
            self._metrics.phase(name, time.monotonic() - start)

    @property
    def _resumed_at(self) -> int | None:
        """Step of the checkpoint that this round started from, 0 for the beginning; None: not known."""
        return self._resumed.at if self._settings.checkpoint_dir is not None else None

    @property
    def _ranks(self) -> dict[int, int]:
        """The workers' global ranks, by local rank."""
        return {local_rank: worker.global_rank for local_rank, worker in enumerate(self.group.workers)}

    @property
    def _workers(self) -> WorkerProcesses:
        assert self._processes is not None, "between two rounds"
        return self._processes
