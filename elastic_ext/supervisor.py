"""The agent: a LocalElasticAgent whose loop waits for events, asks what a failure means, and carries out the decision.

A worker ends -> evidence -> classify -> decide -> restart in a new round, or give up with the reason.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.metrics import put_metric
from torch.distributed.elastic.multiprocessing import LogsSpecs, ProcessFailure, SignalException

import elastic_ext
from elastic_ext import exits, job, launch, policy
from elastic_ext import settings as settings_module
from elastic_ext.checkpoints import discovery
from elastic_ext.errors import JobStopped, UsageError
from elastic_ext.failures import report, user_rules
from elastic_ext.failures.classify import Diagnosis, classify, root_cause
from elastic_ext.failures.evidence import ErrorFile, Evidence, exit_status, read_error_file
from elastic_ext.failures.host import Host, HostSays
from elastic_ext.failures.matching import ASKED
from elastic_ext.failures.report import FailedWorker
from elastic_ext.observe.metrics import AgentMetrics, WorkerProgress, bridge_torchelastic
from elastic_ext.observe.server import MetricsServer
from elastic_ext.plugin import usage_errors_exit
from elastic_ext.policy import Action, Decision
from elastic_ext.torch_seam import AgentSeam
from elastic_ext.wakeup import Wakeup
from elastic_ext.workers import stacks
from elastic_ext.workers.guard import Guard
from elastic_ext.workers.logs import WorkerLogs
from elastic_ext.workers.processes import Exit, WorkerProcesses
from elastic_ext.workers.progress import ProgressBoard
from elastic_ext.workers.stderr_tail import StderrTails

logger = logging.getLogger(__name__)

MEMBERSHIP = "membership"  # kind of a restart that no failure caused
KERNEL_SLEEP_LOOK_S = 1.0  # how often torch's check for workers asleep in the kernel runs, where the user turned it on
RESUME_KEY = "elastic_ext.resume"
PLATFORM_S = 2.0  # that the platform has to say why the agent was told to stop
SHOWN_STACKS = 4000  # characters; the rest is in the file


class Supervisor(AgentSeam):
    """Supervises the workers of one node.

    Invariants: the restart count that workers see only grows and is no budget; a membership change is never charged; whatever
    makes the agent give up, its result is FAILED.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, *args: Any, **kwargs: Any) -> None:
        self._handler: Any = spec.rdzv_handler
        self._settings: settings_module.Settings = self._handler.settings
        self._logs = WorkerLogs(logs_specs)
        with usage_errors_exit():
            self._rules = user_rules.load(self._settings.rules)
            super().__init__(launch.prepare(spec, self._settings), self._logs, *args, **kwargs)
            settings_module.check_times(self._settings, self._handler.torch_conf, self.shutdown_timeout_s)
        self._grace_s = settings_module.stop_grace(self._settings, self.shutdown_timeout_s)
        limit = self._settings.max_restarts
        self._max_restarts = self.spec.max_restarts if limit is None else limit
        self._handler.attached = True
        self._handler.prepare(self.spec, self._max_restarts)
        self._resumed_at: int | None = None  # step of the checkpoint that this round started from; None: not known
        self._token = secrets.token_hex(16)
        self._metrics = AgentMetrics(
            version=elastic_ext.__version__, torch=torch.__version__, run_id=self._handler.get_run_id(), progress=self._progress
        )
        self._processes: WorkerProcesses | None = None
        self._board: ProgressBoard | None = None
        self._wakeup: Wakeup
        self._guard: Guard
        self._stderr: StderrTails
        self._host: Host

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the job on this node; see torch's agent. Nothing that was started here is alive after it, unless it ended well."""
        exits.use(self._settings.exit_codes)
        with ExitStack() as stack:
            self._wakeup = stack.enter_context(Wakeup())
            self._handler.on_news = self._wakeup.set
            if self._settings.metrics:
                host, port = self._settings.metrics_host, self._settings.metrics_port
                # A port that nobody chose must be seen, and torchrun shows warnings only.
                announce = logging.WARNING if port == 0 else logging.INFO
                stack.callback(MetricsServer(self._metrics.registry, host, port, announce).close)
            stack.enter_context(bridge_torchelastic(self._metrics))
            in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            self._logs.run_dir = tempfile.mkdtemp(prefix="elastic_ext_", dir=in_memory)
            stack.callback(shutil.rmtree, self._logs.run_dir, ignore_errors=True)
            self._stderr = self._logs.stderr = StderrTails(self._settings.stderr_tail and self._settings.bootstrap)
            stack.callback(self._stderr.close)
            self._host = Host(self._settings)
            stack.callback(self._host.close)
            self._guard = Guard(self._token, self._logs.run_dir)
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
                self._handler.on_news = lambda: None
                self._forget_round()
                self._guard.close(clean)
            return result

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
            self._told(job.Verdict(decision, self._handler.round, self._handler.node_id, self._handler.host), decision, {})

    # The loop.

    def supervise(self) -> RunResult:
        try:
            with usage_errors_exit():
                self.first_round()
            return self._supervise()
        except JobStopped as stopped:
            return self._stopped_elsewhere(stopped.verdict)

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
                if (over := self._handler.round_over()) is not None:
                    logger.warning("elastic_ext: round %s is over: %s; all workers start again", self._handler.round, over)
                    self._restart(MEMBERSHIP)
                continue
            if result.state is WorkerState.UNKNOWN:  # torch has lost track of the processes; ours are still in view
                self._end_workers()
            self._stderr.settle()
            failed = self._gather(result)
            cause, others = self._explain(failed)
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
            if decision.delay_s > 0:
                threading.Event().wait(decision.delay_s)  # nothing to do meanwhile; a signal raises out of it
            self._restart(decision.kind)

    def _stopped_elsewhere(self, verdict: job.Verdict) -> RunResult:
        """The job has ended because of what happened on another node."""
        self._end_workers()
        self._count_workers("failed")
        logger.error("%s", report.from_elsewhere(verdict))
        self._metrics.failed(verdict.decision.kind)
        self.group.state = WorkerState.FAILED
        return RunResult(WorkerState.FAILED, failures=self._told(verdict, verdict.decision, report.failure_elsewhere(verdict)))

    def _told(self, verdict: job.Verdict, decision: Decision, failures: dict[int, ProcessFailure]) -> exits.Failures:
        """Say the verdict where schedulers look, before any agent leaves."""
        code = policy.EX_FAILED if decision.exit_code is None else decision.exit_code
        exits.decided(code)
        exits.tell(json.loads(job.encode_verdict(verdict)), self._settings.verdict_file)
        return exits.Failures(failures, code)

    def _await_news(self) -> None:
        """Block until a worker ends, a function entrypoint returns, the warden dies, a signal arrives, or a look is due."""
        looks = [self._handler.poll_interval_s] if self._handler.poll_interval_s else []
        if self.watches_kernel_sleep:
            looks.append(KERNEL_SLEEP_LOOK_S)
        warden = [self._guard.pidfd] if self._guard.pidfd is not None else []
        self._workers.wait(min(looks, default=None), self._wakeup, *warden, *self.result_readers)
        self._wakeup.clear()  # before the look, not before the wait: what comes in between must end the next wait
        self._guard.revive()

    def _look(self) -> RunResult:
        """Return the state of the worker group. If one worker has failed, all have been stopped when this returns."""
        if self._workers.failed:
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

    def _gather(self, result: RunResult) -> list[FailedWorker]:
        """The evidence of every worker of this round that did not end well, judged one by one."""
        failed = []
        host = self._host.says()
        for local_rank, pid in self._workers.pids.items():
            exit_ = self._workers.exits.get(local_rank)
            asked_to_end = result.state is WorkerState.UNHEALTHY and exit_ is not None and exit_.asked_ns is not None
            if exit_ is not None and not exit_.failed and not asked_to_end:
                continue
            rank = self.group.workers[local_rank].global_rank
            exitcode = exit_.exitcode if exit_ is not None else -signal.SIGKILL
            error_file = read_error_file(self._logs.error_files.get(local_rank, ""))
            if exitcode is None:  # a function's process that torch or its forkserver has reaped: torch tells of one that failed
                if rank in result.failures:
                    exitcode = result.failures[rank].exitcode
                elif error_file.data is not None:
                    exitcode = 1
                else:
                    continue
            evidence = self._evidence(rank, local_rank, exitcode, exit_, error_file, host)
            diagnosis = classify(evidence, self._rules)
            failed.append(FailedWorker(local_rank, pid, exitcode, error_file, diagnosis))
        return failed

    def _evidence(
        self, rank: int, local_rank: int, exitcode: int, exit_: Exit | None, error_file: ErrorFile, host: HostSays
    ) -> Evidence:
        code, signal_name = exit_status(exitcode)
        progress = self._board.read(local_rank) if self._board else None
        return Evidence(
            rank=rank,
            exit_code=code,
            signal=signal_name,
            exception=error_file.exception,
            stderr_tail=self._stderr.tail(local_rank) or "",
            # The count is of a whole group: it says nothing of a worker that ended otherwise.
            oom_kills=host.oom_kills if signal_name == signal.SIGKILL.name else None,
            xids=host.xids,
            platform=host.platform,
            node=self._handler.host,
            step=progress.steps if progress and progress.pid else None,
            first_step_done=progress.first_step_done if progress else None,
            stopped_by_agent=exit_ is None or exit_.was_asked(error_file.raised_ns),
            ended_ns=error_file.raised_ns or (exit_.seen_ns if exit_ is not None else time.monotonic_ns()),
        )

    def _explain(self, failed: Sequence[FailedWorker]) -> tuple[FailedWorker, list[FailedWorker]]:
        """Return the worker that explains the failure here, and the others."""
        diagnosis: Diagnosis = root_cause([worker.diagnosis for worker in failed])
        cause = next(worker for worker in failed if worker.diagnosis.evidence is diagnosis.evidence)
        return cause, [worker for worker in failed if worker is not cause]

    def _conclude(self, result: RunResult, cause: FailedWorker) -> job.Verdict:
        """What to do, for the whole job."""
        if result.state is WorkerState.UNHEALTHY:
            reason = "a worker slept in the kernel for longer than the limit; this host may need a restart"
            code = policy.EXIT_CODES[self._settings.exit_codes].get(policy.EX_NODE, policy.EX_NODE)
            decision = Decision(Action.STOP, "hardware", reason, code, "kernel-sleep")
            return job.Verdict(decision, self._handler.round, self._handler.node_id, self._handler.host)
        with self._phase("verdict"):
            verdict: job.Verdict = self._handler.conclude(job.Report(self._handler.host, cause.diagnosis, self._resumed_at))
        return verdict

    # Rounds.

    def _restart(self, kind: str) -> None:
        self._metrics.restarted(kind)
        self.next_round()

    def join_round(self) -> None:
        with self._phase("rendezvous"):
            super().join_round()
        self._metrics.round_started(self._handler.round, self.group.workers[0].world_size)

    def start_workers(self) -> dict[int, Any]:
        count = self._handler.round - 1
        self._board = self._make_board(count)
        self._logs.variables = {
            "TORCHELASTIC_RESTART_COUNT": str(count),
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
            **dict.fromkeys(settings_module.SECRET_VARIABLES & os.environ.keys(), ""),  # a worker inherits what it is not given
            **self._resume_variables(),
        }
        self._logs.tell = {slot: {"agent": self._token} for slot in range(self.spec.local_world_size)}
        if self._settings.bootstrap and self._board is not None:
            for slot, told in self._logs.tell.items():
                told.update(slot=slot, progress=self._board.path)
        with self._phase("start"):
            pids = super().start_workers()
        self._processes = WorkerProcesses(pids, self.leads_groups)
        self._guard.watch(pids.values(), self._handler.last_will())
        self._host.round_started(pids.values())
        self._count_workers("running")
        return pids

    def _make_board(self, count: int) -> ProgressBoard | None:
        """In memory if there is room, else on disk, else none: the job runs without it."""
        for directory in (self._logs.run_dir, tempfile.gettempdir()):
            try:
                return ProgressBoard(os.path.join(directory, f"progress.{self._token}.{count}"), self.spec.local_world_size)
            except OSError as error:
                logger.warning("no room for the progress words in %s: %s", directory, error)
        return None

    def stop_workers(self) -> None:
        self._end_workers()
        super().stop_workers()
        self._forget_round()

    def _end_workers(self) -> None:
        """Stop what still runs, within the grace; once a round."""
        if self._processes is not None and not self._processes.stopped:
            by = self._handler.stop_by()
            grace_s = self._grace_s if by is None else min(self._grace_s, max(0.0, by - time.monotonic()))
            with self._phase("stop"):
                self._processes.stop(grace_s, lambda local_ranks: self._show_stragglers(local_ranks, grace_s))
            self._count_workers("stopped")

    def _forget_round(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None
        if self._board is not None:
            self._board.remove()
            self._board = None

    def _resume_variables(self) -> dict[str, str]:
        """What the workers are told to resume from: chosen once, by group rank 0, and the same on every node."""
        directory = self._settings.checkpoint_dir
        if directory is None:
            return {}
        store = self.group.store
        assert store is not None
        if self.group.group_rank == 0:
            try:
                search = discovery.newest_complete(directory)
            except (UsageError, OSError) as error:
                store.set(RESUME_KEY, json.dumps({"error": str(error)}))
                raise
            for passed in search.passed_over:
                logger.warning("checkpoint passed over: %s: %s", passed.path, passed.reason)
            store.set(RESUME_KEY, json.dumps(asdict(search.resume) if search.resume else None))
        chosen = json.loads(store.get(RESUME_KEY))
        self._resumed_at = chosen.get("step") if chosen is not None else 0
        if chosen is None:
            logger.info("no complete checkpoint in %s: the job starts from the beginning", directory)
            return {}
        if "error" in chosen:
            raise UsageError(f"group rank 0 cannot tell what to resume from: {chosen['error']}")
        logger.info("resuming from %s, step %s (%s)", chosen["path"], chosen["step"], chosen["reason"])
        variables = {"ELASTIC_EXT_RESUME_FROM": chosen["path"]}
        if chosen["step"] is not None:
            variables["ELASTIC_EXT_RESUME_STEP"] = str(chosen["step"])
        return variables

    # What is shown.

    def _show_stragglers(self, local_ranks: list[int], grace_s: float) -> None:
        """Say who did not end in time, and where it was: the one moment to learn why."""
        for local_rank in local_ranks:
            pid = self._workers.pids[local_rank]
            where = ""
            if self._board is not None and self._board.read(local_rank).stacks_armed:
                where = stacks.dump(pid, self._logs.stacks_files[local_rank])
            logger.warning(
                "worker %s (pid %s) did not end within %.2g s of SIGTERM and is killed%s",
                local_rank,
                pid,
                grace_s,
                f"; it was at:\n{where[:SHOWN_STACKS]}" if where else "",
            )

    def _progress(self) -> list[WorkerProgress]:
        """The workers' progress words, for the metrics; called from the threads of the metrics server."""
        board, now_ns = self._board, time.monotonic_ns()
        words = [board.read(slot) for slot in range(self.spec.local_world_size)] if board is not None else []
        return [
            WorkerProgress(slot, word.steps, (now_ns - word.last_step_ns) / 1e9 if word.last_step_ns else None)
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
    def _workers(self) -> WorkerProcesses:
        assert self._processes is not None, "between two rounds"
        return self._processes
