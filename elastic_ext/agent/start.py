"""The start of a round, from its checkpoint to running workers."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from torch.distributed.elastic.agent.server.api import WorkerGroup

from elastic_ext.agent import launch
from elastic_ext.agent.companion import LocalWorkers
from elastic_ext.agent.companions import JobCompanions
from elastic_ext.agent.drain import DrainWatch
from elastic_ext.agent.hangs import HangHandling
from elastic_ext.agent.resume import ResumePoint
from elastic_ext.agent.round import RunningRound
from elastic_ext.agent.saves import SaveOnDemand
from elastic_ext.base import log_records, names
from elastic_ext.base.settings import Settings
from elastic_ext.base.torch_private import started_by
from elastic_ext.rendezvous.address import is_loopback, look_up
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.workers import descriptors
from elastic_ext.workers.hangs.quiet_watch import QuietWatch
from elastic_ext.workers.hangs.watch import HangWatch
from elastic_ext.workers.logs import WorkerLogs
from elastic_ext.workers.processes import WorkerProcesses
from elastic_ext.workers.progress import EndingWorkers, ProgressTable

logger = logging.getLogger(__name__)

GLOO = "GLOO_SOCKET_IFNAME"


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


class RoundStart:
    """Starts the workers of one round on this node."""

    def __init__(
        self, handler: Rendezvous, settings: Settings, logs: WorkerLogs, companions: JobCompanions, group: WorkerGroup
    ) -> None:
        """group: torch's worker group, after the rendezvous."""
        self._handler, self._settings, self._logs = handler, settings, logs
        self._companions, self._group = companions, group

    def run(
        self, resumed: ResumePoint, start_processes: Callable[[], Mapping[int, int]], own_groups: Callable[[], bool]
    ) -> RunningRound:
        """Start the workers; if that fails, release everything that was made for them. The order matters:

        1. The copier learns what the round resumes from, before a worker can save.
        2. The progress table is made, because the workers need its path.
        3. Workers' variables and messages are set, because torch calls `WorkerLogs` for the environment while it starts them.
        4. Torch starts the processes, or standbys become them. Each gets the user's limit of open files at once.
        5. Pidfds are opened before anything else: from then on no signal can reach a reused pid.
        6. The RunningRound begins. The reaper is its first companion, so that nothing that fails later leaves orphans.

        Args:
            start_processes: makes torch start them; returns the pids by local rank.
            own_groups: returns, once they are started, whether each worker leads its own process group.
        """
        companions = self._companions
        with ExitStack() as undo:
            undo.callback(resumed.release)
            if companions.copier is not None:
                companions.copier.abandon_newer_than(resumed.checkpoint.path)
            progress = self._make_progress_table()
            if progress is not None:
                undo.callback(progress.remove)
            told = progress if self._settings.bootstrap and launch.has_bootstrap(self._group.spec) else None
            companions.observation.goodput.round_begins(told, resumed.step, self._group.group_world_size)
            self._set_worker_environment(resumed, progress)
            with started_by(companions.warm_starts.start, descriptors.restore_user_limit):
                pids = start_processes()
            for pid in pids.values():  # includes function entrypoints, which torch starts in its own way
                descriptors.restore_user_limit(pid)
            processes = WorkerProcesses(pids, own_groups())
            undo.callback(processes.close)
            running = self._make_round(processes, progress, resumed, own_groups())
            undo.pop_all()
        return running

    def _make_progress_table(self) -> ProgressTable | None:
        """Make the table in memory if there is room, else on disk; return None if neither works, and the job runs without it."""
        for directory in (self._logs.run_dir, tempfile.gettempdir()):
            path = os.path.join(directory, f"progress.{self._companions.token}.{self._handler.round - 1}")
            try:
                return ProgressTable(path, self._group.spec.local_world_size)
            except OSError as error:
                logger.warning("no room for the progress table in %s: %s", directory, error)
        return None

    def _set_worker_environment(self, resumed: ResumePoint, progress: ProgressTable | None) -> None:
        """Set the variables and messages that workers find in their environment."""
        spec, companions = self._group.spec, self._companions
        self._logs.variables = {
            "TORCHELASTIC_RESTART_COUNT": str(self._handler.round - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts(spec, self._settings)),
            **launch.blanked_secrets(os.environ),
            "ELASTIC_EXT_LAUNCH": self._handler.launch,
            log_records.NODE_NAME: self._handler.host,
            **resumed.variables(),
            **(gloo_interface(self._handler.address) if self._group.group_world_size > 1 else {}),
            **names.variables(os.environ),
            **(companions.flight_recorder.variables if companions.flight_recorder is not None else {}),
        }
        self._logs.own_variables = {
            local_rank: resumed.own_variables(each.global_rank) for local_rank, each in enumerate(self._group.workers)
        }
        self._logs.messages = {
            local_rank: {
                "agent": companions.token,
                **companions.observation.message(self._handler.round, local_rank, each.global_rank),
            }
            for local_rank, each in enumerate(self._group.workers)
        }
        if progress is None:
            return
        if self._settings.bootstrap:
            for local_rank, message in self._logs.messages.items():
                message.update(slot=local_rank, progress=progress.path, wake_pipe=companions.wake_pipe.path, store=self._store_at)
        companions.warm_starts.before_start()

    def _make_round(
        self, processes: WorkerProcesses, progress: ProgressTable | None, resumed: ResumePoint, own_groups: bool
    ) -> RunningRound:
        settings, companions = self._settings, self._companions
        ranks = {local_rank: worker.global_rank for local_rank, worker in enumerate(self._group.workers)}
        workers = LocalWorkers(
            processes, progress, ranks, dict(self._logs.error_files), dict(self._logs.stacks_files), resumed.step
        )
        hangs = saves = None
        if settings.bootstrap and progress is not None:
            saves = SaveOnDemand(self._handler, progress, self._group.group_world_size, self._store_at)
        # Without the bootstrap, workers never report progress, and that is no sign of a hang.
        if settings.hang and launch.has_bootstrap(self._group.spec) and progress is not None and own_groups:
            watch = HangWatch(progress, ranks, settings.hang_timeout, self._group.workers[0].world_size)
            quiet = QuietWatch(progress, ranks, settings.hang_timeout)
            hangs = HangHandling(watch, quiet, self._handler, companions.flight_recorder)
        ending = EndingWorkers(progress, processes.pids, companions.wake_pipe)
        warm = companions.warm_starts.after_start(processes.pids)
        companions.journal.warm = len(warm)
        others = [DrainWatch(self._handler, saves, settings), *companions.round_companions]
        return RunningRound(workers, ending, warm, resumed, hangs, saves, others)

    @property
    def _store_at(self) -> tuple[str, int]:
        """Host and port of the store of the round."""
        return self._group.master_addr, self._group.master_port
