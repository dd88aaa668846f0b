"""One round on this node: `RoundStart` starts its workers, `RunningRound` holds them, `RoundWatch` watches them to the end."""

from __future__ import annotations

import functools
import logging
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.metrics import put_metric

from elastic_ext.agent import launch, leaving, verdicts
from elastic_ext.agent.beginning import RoundBeginning
from elastic_ext.agent.companion import Companion, LocalWorkers, RoundPlace, StallWatch
from elastic_ext.agent.companions import JobCompanions
from elastic_ext.agent.feature import RoundParts
from elastic_ext.agent.positions import show_stragglers
from elastic_ext.base import log_records, name_lookup, printable
from elastic_ext.base.settings import Settings
from elastic_ext.base.torch_private import TorchAgent, reraise_signals, started_by
from elastic_ext.failures.classify import Diagnosis, classify
from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.host import ANSWER_S, HostEvidence
from elastic_ext.failures.ledger import MAX_STACKS, Report
from elastic_ext.hangs.detector import Stuck
from elastic_ext.rendezvous.address import is_loopback, look_up
from elastic_ext.rendezvous.contract import EndKind, Rendezvous, RoundEnd
from elastic_ext.workers import leftovers, limits, reaper
from elastic_ext.workers.logs import StderrTails, WorkerLogs
from elastic_ext.workers.processes import StopLimit, WorkerProcesses, build_locks, remove_build_locks
from elastic_ext.workers.progress import EndingWorkers, Progress, ProgressTable

logger = logging.getLogger(__name__)

TORCHS_CHECK_S = 1.0  # how often torch looks at the workers, where it alone sees that one sleeps in the kernel or has returned
GLOO = "GLOO_SOCKET_IFNAME"


class RunningRound:
    """The workers of this node from their start to the end of the round, with their companions.

    It is made when all workers run, and closed once. Invariant: after stop() no worker runs and none is sent a signal.
    """

    def __init__(
        self,
        workers: LocalWorkers,
        ending: EndingWorkers,
        warm: Collection[int],
        beginning: RoundBeginning,
        saves: leaving.SavesOnDemand | None,
        others: Iterable[Companion],
    ) -> None:
        """Notify all companions that the workers have started.

        ending: the workers that are about to end with an error. warm: local ranks of those that were warm standbys.
        """
        self.workers, self.beginning = workers, beginning  # processes, progress and files; where they begin
        self.saves = saves  # None if workers cannot be asked to save
        # whether workers that this agent stops count as failed: replicas differ, or a link went down here; `RoundWatch` sets it
        self.stopped_count = False
        self._ending, self._warm = ending, warm
        self._stacks: list[str] = []  # for the verdict: the positions of workers that did not end by themselves
        self._companions = [*others, *filter(None, (saves, beginning))]
        self._stalls = [each for each in self._companions if isinstance(each, StallWatch)]
        for companion in self._companions:
            companion.workers_started(workers)

    @property
    def failed(self) -> bool:
        """Whether a worker has failed, or says that it is about to end with an error."""
        return self.workers.processes.failed or bool(self._ending.exit_codes())

    @property
    def stopped(self) -> bool:
        return self.workers.processes.stopped

    @property
    def stalled(self) -> bool:
        """Whether all workers of this node stall."""
        return any(each.stalled for each in self._stalls)

    def next_check_s(self) -> float:
        """Return the seconds until the next check is due even without an event; infinity: none is due."""
        return min(companion.next_check_s() for companion in self._companions)

    def failed_since(self) -> float | None:
        """Return when the first worker that failed has ended, monotonic; None if that is unknown.

        Of one that was killed, it is when the agent saw it: no record says when it ended.
        """
        ended = [row.ended_ns for row in self.workers.read_progress() if row.ends_with and row.ended_ns]
        ended += [each.seen_ns for each in self.workers.processes.exits.values() if each.failed]
        return min(ended) / 1e9 if ended else None

    def quiet_since(self) -> float | None:
        """Return when a worker of this node last gave a sign of life, monotonic; None if not all have given one."""
        signs = [row.sign_ns for row in self.workers.read_progress()]
        return max(signs) / 1e9 if signs and all(signs) else None

    def check(self) -> None:
        """Let each companion check the workers, which keep running."""
        for companion in self._companions:
            companion.check(self.workers)

    def stop(self, grace_s: float, show_stacks: bool = True, limit: StopLimit | None = None, after_failure: bool = False) -> None:
        """Stop the workers that still run; kill those that outlive grace_s seconds.

        show_stacks: before killing those, dump their stacks. limit: may shorten grace_s at any time. after_failure: whether they
        are stopped because a worker of the job has failed; see `without_grace`.
        """

        def on_stragglers(local_ranks: list[int]) -> None:
            if show_stacks and (limit is None or limit.stop_by() is None):  # dumping takes time
                self._stacks += show_stragglers(self.workers, local_ranks, grace_s)

        rows = self.workers.read_progress()
        locks = build_locks(pid for each, pid in self.workers.running_pids().items() if not (rows and rows[each].steps))
        processes = self.workers.processes
        exitcodes = [each.exitcode for each in processes.exits.values() if each.failed]
        asked = set(processes.running) - self._ending.exit_codes().keys()
        at_once = without_grace(rows, exitcodes) & asked if after_failure else frozenset[int]()
        if at_once:
            which = printable.ranks_in_words(self.workers.ranks[each] for each in at_once)
            logger.info("killing %s at once: on SIGTERM, transformers would begin a save that cannot end after a failure", which)
        processes.stop(grace_s, on_stragglers, ending=self._ending, limit=limit, at_once=at_once)
        remove_build_locks(locks)

    def examine_hung(self) -> Mapping[int, Stuck]:
        """Find out where each worker hangs, while it still runs. Return those that the others wait for, by local rank."""
        for each in self._stalls:
            self._stacks += each.examine(self.workers)
        return self._hung

    @property
    def _hung(self) -> Mapping[int, Stuck]:
        return {local_rank: stuck for each in self._stalls for local_rank, stuck in each.hung.items()}

    def ended(self, node: str, host: HostEvidence, stderr: StderrTails, result: RunResult) -> verdicts.EndedRound:
        """Return the evidence of how the workers of this node ended. result: torch's."""
        asked_to_end = result.state is WorkerState.UNHEALTHY or self.stopped_count
        return verdicts.EndedRound(node, host, self.workers, stderr, self._warm, self._hung, result.failures, asked_to_end)

    def report(self, node: str, diagnosis: Diagnosis) -> Report:
        """Return this node's report on its failure, for the verdict of the job."""
        rows = self.workers.read_progress()
        copied_at, saved_at = self.beginning.newest_steps(rows)
        report = Report(
            node,
            diagnosis,
            self.beginning.step,
            printable.beginnings(self._stacks, MAX_STACKS),
            printable.redacted(self.beginning.checkpoint.path),
            verdicts.reach_by(diagnosis),
            copied_at,
            saved_at,
            tuple(self.workers.ranks.values()),
            counts_from=next((row.steps_before for row in rows if row.steps_before is not None), self.beginning.step),
            save_number=self.beginning.checkpoint.save_number,
            ended=verdicts.ended_well(self.workers),
        )
        return functools.reduce(lambda known, each: each.reported(known, self.workers), self._companions, report)

    def all_done(self, job: Rendezvous) -> bool:
        """Wait until the workers of all nodes have finished, as those here have. Return False if the round ends otherwise."""
        done = job.part.await_all_done()
        if not done:
            self.report_ended(job)
        return done

    def report_ended(self, job: Rendezvous) -> None:
        """Report which workers of this node had ended with 0, if workers of other nodes have failed, or hang: they may wait."""
        over, ended = job.part.over(), verdicts.ended_well(self.workers)
        if ended and over is not None and over.kind in (EndKind.FAILED, EndKind.STALLED):
            first = Evidence(ended[0].rank, exit_code=0, step=ended[0].step, stopped_by_agent=True, node=job.node.host)
            job.part.conclude(self.report(job.node.host, classify(first)))

    def close(self) -> None:
        """Close everything that belongs to this round only. The workers have been stopped, or torch will stop them."""
        for companion in self._companions:
            companion.workers_ended(self.workers)
        self.workers.processes.close()
        if self.workers.progress is not None:
            self.workers.progress.remove()


def without_grace(workers: Sequence[Progress], exitcodes: Iterable[int | None]) -> frozenset[int]:
    """Return which workers get no time to end after a failure, by local rank: those that would only begin a save then.

    SIGTERM has Hugging Face's Trainer save after a later step, which does not come, and stay. A worker that SIGTERM itself ended
    may be the first to notice a preemption: then all get their time.

    workers: the progress of each worker of this node. exitcodes: of those that have failed.
    """
    if -signal.SIGTERM in exitcodes:
        return frozenset()
    return frozenset(local_rank for local_rank, worker in enumerate(workers) if worker.jit_saves)


def how_to_stop(kind: EndKind, hung: bool) -> tuple[float | None, bool]:
    """Return the arguments of `StopWorkers` for the end of a round.

    A worker that waits forever cannot end cleanly, and one whose state is wrong must not save it. The loss of a node may be a
    preemption, so it does not count as a failure.

    hung: whether the workers of this node hang.
    """
    return 0.0 if hung or kind is EndKind.DIFFERS else None, kind is EndKind.FAILED


class StopWorkers(Protocol):
    """Stops the workers of a round that still run, with the given grace in seconds, or the usual one for None."""

    def __call__(self, grace_s: float | None = None, after_failure: bool = False) -> None: ...


class RoundWatch:
    """Watches the workers of one round until they have finished or failed, or until the round is over."""

    def __init__(
        self,
        agent: TorchAgent,
        handler: Rendezvous,
        companions: JobCompanions,
        running: RunningRound,
        stderr: StderrTails,
        stop: StopWorkers,
    ) -> None:
        self._agent, self._handler, self._companions = agent, handler, companions
        self._running, self._stderr, self._stop = running, stderr, stop

    def run(self) -> RunResult | None:
        """Return how the workers ended; None if the round is over and no worker of this node has failed.

        Unless the workers have finished, none runs when this returns.
        """
        agent = self._agent
        while True:
            self._await_event()
            result = self._check_workers()
            agent.group.state = result.state
            put_metric(f"workers.{agent.spec.role}.remaining_restarts", agent.remaining_restarts)
            put_metric(f"workers.{agent.spec.role}.{result.state.name.lower()}", 1)
            if result.state is WorkerState.UNKNOWN:  # torch has lost track of the processes; we have not
                self._stop()
            if result.state is not WorkerState.HEALTHY:
                return result
            self._running.check()
            over = self._handler.part.over()
            if over is not None:
                return self._end(over)

    def _await_event(self) -> None:
        """Block until a worker ends or wakes us, a function returns, the reaper dies, a signal arrives, or a check is due."""
        asks_torch = self._agent.watches_kernel_sleep or self._agent.polls_results
        check_s = min(self._running.next_check_s(), TORCHS_CHECK_S if asks_torch else math.inf)
        wakeup, wake_pipe, reaper = self._companions.wakeup, self._companions.wake_pipe, self._companions.reaper
        reaper_fd = [reaper.pidfd] if reaper.pidfd is not None else []
        processes = self._running.workers.processes
        processes.wait(check_s if check_s < math.inf else None, wakeup, wake_pipe, *reaper_fd, *self._agent.result_readers)
        reraise_signals(wakeup.clear())  # after the wait, before the check: an event during the check must end the next wait
        wake_pipe.clear()
        reaper.revive()

    def _check_workers(self) -> RunResult:
        """Return the state of the worker group. If one worker failed, all are stopped when this returns."""
        processes = self._running.workers.processes
        if self._running.failed:
            # First: workers elsewhere wait in collectives.
            self._handler.part.break_off(f"workers failed on {self._handler.node.host}", failed=True)
            self._companions.observation.acts(self._running.failed_since())
            self._companions.host.start_asking()
            self._stop(after_failure=True)
            return self._agent.close_failed()
        if self._agent.result_readers or self._agent.polls_results or not processes.running:
            result = self._agent.reap()
            processes.poll()
            return result
        asleep = self._agent.asleep_in_kernel()
        if asleep is not None:
            self._stop()
            return asleep
        return RunResult(WorkerState.HEALTHY)

    def _end(self, over: RoundEnd) -> RunResult | None:
        """Stop the workers of a round that is over; return their failure, or None if none failed unasked."""
        logger.warning("elastic_ext: round %s is over: %s; stopping all workers", self._handler.part.round, over)
        self._companions.journal.round_over(over)
        hung = over.kind is EndKind.STALLED and self._running.stalled
        if over.kind is EndKind.STALLED:
            self._companions.observation.verdicts.hung()
        if hung:
            quiet_since = self._running.quiet_since()
            self._companions.observation.acts(quiet_since)
            self._companions.journal.hung(self._running.examine_hung(), quiet_since)
        differs = over.kind is EndKind.DIFFERS
        self._companions.host.links.look()  # ends beside the workers
        self._stop(*how_to_stop(over.kind, hung))
        self._companions.observation.node.round_ended(over.reason)
        workers = self._running.workers
        elsewhere = over.kind is EndKind.FAILED
        failed = verdicts.failed_by_itself(workers) or (elsewhere and verdicts.says_why(workers, self._stderr))
        here = differs or (elsewhere and bool(self._companions.host.links.went_down(ANSWER_S).names))
        self._running.stopped_count = here and verdicts.stopped(workers)
        if not hung and not failed and not self._running.stopped_count:
            self._running.report_ended(self._handler)
            return None
        self._companions.host.start_asking()
        return self._agent.close_failed()


@functools.cache
def gloo_interface(address: str) -> dict[str, str]:
    """Return the variable that gloo needs where it would take the loopback, in a job of several nodes. The first call logs it.

    address: by which the other nodes reach this one.
    """
    if GLOO in os.environ or is_loopback(address):
        return {}
    try:
        found = look_up(address)
    except OSError as error:
        logger.warning("the interfaces of this host cannot be listed, so %s is not set: %s", GLOO, error)
        return {}
    if not found.loops:
        return {}
    if not found.interface:
        logger.warning("%s, and no interface has the address %s: if workers cannot connect, set %s", found, address, GLOO)
        return {}
    logger.warning("%s: the workers get %s=%s, the interface of %s", found, GLOO, found.interface, address)
    return {GLOO: found.interface}


class Leftovers(Companion):
    """Ends what workers that were stopped have left, where it holds what the next round needs."""

    def __init__(self, token: str, port: int, places: Iterable[str]) -> None:
        """token: the agent's. port: of the round's store. places: where workers save, paths and URLs."""
        self._token = token
        self._needs = leftovers.Needs(port, tuple(os.path.realpath(each) for each in places if os.path.isabs(each)))

    def workers_ended(self, workers: LocalWorkers) -> None:
        if workers.processes.stopped:  # else the job ends well, and they have left it on purpose
            leftovers.end(self._token, self._needs, frozenset(workers.processes.pids.values()))


class RoundStart:
    """Starts this node's workers of one round."""

    def __init__(
        self, handler: Rendezvous, settings: Settings, logs: WorkerLogs, companions: JobCompanions, group: WorkerGroup
    ) -> None:
        """group: torch's worker group, after the rendezvous."""
        self._handler, self._settings, self._logs = handler, settings, logs
        self._companions, self._group = companions, group

    def run(
        self, resumed: RoundBeginning, start_processes: Callable[[], Mapping[int, int]], own_groups: Callable[[], bool]
    ) -> RunningRound:
        """Start the workers; if that fails, release everything that was made for them. The order matters:

        1. The features (as the copier) learn what the round resumes from, before a worker can save.
        2. The progress table is made, because the workers need its path.
        3. Workers' variables and messages are set, because torch calls `WorkerLogs` for the environment while it starts them.
        4. Torch starts the processes, or standbys become them. Each gets the user's limit of open files at once.
        5. Pidfds are opened before anything else: from then on no signal can reach a reused pid.
        6. The reaper learns of them, and how to take this node out of the job, so that nothing that fails later leaves orphans.
        7. The RunningRound begins.

        start_processes: makes torch start them; returns the pids by local rank. own_groups: returns, once they are started,
        whether each worker leads its own process group.
        """
        companions = self._companions
        with ExitStack() as undo:
            undo.callback(resumed.release)
            for feature in companions.features:
                feature.round_begins(resumed)
            progress = self._make_progress_table()
            if progress is not None:
                undo.callback(progress.remove)
            table = progress if launch.has_bootstrap(self._group.spec) else None
            companions.observation.goodput.round_begins(table, resumed.step, self._group.group_world_size)
            self._set_worker_environment(resumed, progress)
            with started_by(companions.warm_starts.start, self._started, self._holds_interrupts):
                pids = start_processes()
            for pid in pids.values():  # includes function entrypoints, which torch starts in its own way
                self._started(pid)
            processes = WorkerProcesses(pids, own_groups())
            undo.callback(processes.close)
            companions.reaper.watch(pids.values())
            companions.host.round_started(pids.values())  # earlier events have nothing to do with this round
            running = self._make_round(processes, progress, resumed, own_groups())
            undo.pop_all()
        return running

    @property
    def _holds_interrupts(self) -> bool:
        """Whether workers start with SIGINT blocked: the interpreter would show our file if one came at its first instruction."""
        return launch.has_bootstrap(self._group.spec) and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def _started(self, pid: int) -> None:
        limits.restore_user_limit(pid)
        reaper.mark(pid, self._companions.token)

    def _make_progress_table(self) -> ProgressTable | None:
        """Make the table in memory if there is room, else on disk; return None if neither works, and the job runs without it."""
        name, workers = f"progress.{self._companions.token}.{self._handler.part.round - 1}", self._group.spec.local_world_size
        try:
            return ProgressTable(os.path.join(self._logs.run_dir, name), workers)
        except OSError as error:
            logger.warning("no room for the progress table in %s: %s", self._logs.run_dir, error)
        with ExitStack() as undo:
            try:
                folder = tempfile.mkdtemp(prefix=launch.RUN_DIR)
                undo.callback(shutil.rmtree, folder, ignore_errors=True)
                table = ProgressTable(os.path.join(folder, name), workers, folder)
            except OSError as error:
                logger.warning("no room for the progress table on disk: %s", error)
                return None
            undo.pop_all()
        return table

    def _set_worker_environment(self, resumed: RoundBeginning, progress: ProgressTable | None) -> None:
        spec, companions = self._group.spec, self._companions
        self._logs.variables = {
            "TORCHELASTIC_RESTART_COUNT": str(self._handler.part.round - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts(spec, self._settings)),
            **launch.blanked_secrets(os.environ),
            "ELASTIC_EXT_LAUNCH": self._handler.launch,
            log_records.NODE_NAME: self._handler.node.host,
            **resumed.variables(),
            **(gloo_interface(self._handler.node.address) if self._group.group_world_size > 1 else {}),
            **name_lookup.variables(os.environ),
        }
        for feature in companions.features:
            self._logs.variables |= feature.variables()
        self._logs.own_variables = {
            local_rank: resumed.own_variables(each.global_rank) for local_rank, each in enumerate(self._group.workers)
        }
        message: dict[str, object] = {"agent": companions.token, "mark": reaper.mark_of(companions.token)}
        if self._holds_interrupts:
            message["interrupts_held"] = True
        if progress is not None:
            message |= {"progress": progress.path, "wake_pipe": companions.wake_pipe.path, "store": self._store_at}
            for feature in companions.features:
                message |= feature.message()
        self._logs.messages = {local_rank: {**message, "slot": local_rank} for local_rank in range(len(self._group.workers))}
        if progress is not None:
            companions.warm_starts.before_start()

    def _make_round(
        self, processes: WorkerProcesses, progress: ProgressTable | None, resumed: RoundBeginning, own_groups: bool
    ) -> RunningRound:
        companions = self._companions
        ranks = {local_rank: worker.global_rank for local_rank, worker in enumerate(self._group.workers)}
        workers = LocalWorkers(
            processes, progress, ranks, dict(self._logs.error_files), dict(self._logs.stacks_files), resumed.step
        )
        saves = None
        if progress is not None:
            saves = leaving.SavesOnDemand(self._handler, progress, self._group.group_world_size, self._store_at)
        bootstrap = launch.has_bootstrap(self._group.spec)
        parts = RoundParts(self._place, ranks, progress, bootstrap, own_groups, self._logs.messages, saves)
        ending = EndingWorkers(progress, companions.wake_pipe)
        warm = companions.warm_starts.after_start(processes.pids)
        companions.journal.warm = len(warm)
        # Those of the round end before those that show what they find.
        beside_round = filter(None, (each.beside_round(parts) for each in companions.features))
        places = [place for each in companions.features for place in each.saves_to()]
        others = [*beside_round, Leftovers(companions.token, self._store_at[1], places), *companions.beside_workers]
        return RunningRound(workers, ending, warm, resumed, saves, others)

    @property
    def _place(self) -> RoundPlace:
        group = self._group
        world = group.workers[0].world_size
        return RoundPlace(self._handler.node.host, group.group_rank, group.group_world_size, world, self._store_at)

    @property
    def _store_at(self) -> tuple[str, int]:
        """Host and port of the store of the round."""
        return self._group.master_addr, self._group.master_port
