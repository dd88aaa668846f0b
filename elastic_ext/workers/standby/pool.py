"""The warm standbys of one agent. A thread keeps them ready, new workers take them, and the thread replaces them.

If none is ready, or if a standby would differ from a newly started process, the worker starts cold, and the reason is counted and
logged once. A start waits for a standby only where another round has ended while the server still imports: it has begun with what
all workers would have to import again.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_ext.workers.standby import rules
from elastic_ext.workers.standby.client import WarmPopen
from elastic_ext.workers.standby.cold_starts import NOT_READY, ColdStarts
from elastic_ext.workers.standby.modules import PreloadedModules
from elastic_ext.workers.standby.pool_thread import PoolThread, ServerStarter
from elastic_ext.workers.standby.rules import Cold, ColdReason
from elastic_ext.workers.standby.spec import StandbySpec
from elastic_ext.workers.standby.waiting import WaitingStandbys

logger = logging.getLogger(__name__)

AWAIT_S = 30.0  # for standbys that are on their way; imports that take longer may be stuck, and are not waited for again


class StandbyPool:
    """The pool, for the supervisor's thread. It shares its `_cold`, `_modules` and `_waiting` with the pool's thread.

    Attributes:
        workers_import_torch: workers of an earlier round did, so a cold start takes at least as long as that.
    """

    def __init__(
        self,
        spec: StandbySpec,
        run_dir: str,
        started: Callable[[str, str], None],
        shown: Callable[[int, int], None],
    ) -> None:
        """Begin to make standbys.

        Args:
            run_dir: a directory for small files.
            started: called for each worker start with "warm" or "cold", and the reason.
            shown: called with the number of waiting standbys and the bytes that they and their server use.

        Raises:
            OSError, RuntimeError: no descriptor or thread is available.
        """
        self._spec = spec
        self._cold = ColdStarts(started)
        self._modules = PreloadedModules(spec)
        self._waiting = WaitingStandbys()
        starter = ServerStarter(spec, run_dir, self._modules)
        self._thread = PoolThread(starter, self._modules, self._waiting, self._cold, shown)
        self._released: list[int] = []  # pids, since the last round was started
        self._patient = True  # no wait for standbys has been too long
        self.workers_import_torch = False

    def start(self, args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any) -> subprocess.Popen[bytes] | None:
        """Release a standby to run this command; log why and return None if the command needs a cold start."""
        args, processors = rules.split_numactl(args)
        cold = self._why_cold(args, env, processors)
        if cold is NOT_READY and self._await():
            cold = self._why_cold(args, env, processors)
        while cold is None:
            standby = self._waiting.take()
            if standby is None:
                cold = NOT_READY
                break
            program = list(args[len(self._spec.python) + 1 :])
            try:
                process = WarmPopen(standby, args, program, env, processors, stdout=stdout, stderr=stderr)
            except OSError as error:
                logger.warning("cannot release a standby (pid %s): %s", standby.pid, error)
                continue
            self._cold.count_warm()
            self._released.append(process.pid)
            return process
        self._cold.count_cold(cold)
        return None

    def _await(self) -> bool:
        """Wait for standbys if they come sooner than a cold worker would. Return whether any has come."""
        if self.workers_import_torch and self._patient:
            self._patient = self._thread.await_standbys(AWAIT_S)
        return bool(len(self._waiting))

    def await_first(self) -> None:
        """Wait for the first standbys; no workers run yet."""
        self._patient = self._thread.await_standbys(AWAIT_S)

    def _why_cold(self, args: Sequence[str], env: Mapping[str, str], processors: frozenset[int] | None) -> Cold | None:
        command = [*self._spec.python, self._spec.bootstrap]
        if list(args[: len(command)]) != command:
            return Cold(ColdReason.WRAPPED, f"another command wraps the worker's: {args[0]}")
        if (reason := self._cold.reason) is not None:
            return reason
        unbindable = rules.why_unbindable(processors, os.sched_getaffinity(0), env)
        if unbindable is not None:
            return Cold(ColdReason.PROCESSORS, unbindable)
        if not len(self._waiting):
            return NOT_READY
        if (changed := self._waiting.differs(env)) is not None:
            self._thread.wake()
            return Cold(ColdReason.CHANGED, f"{changed} has changed since the standbys were started")
        return None

    def skip_next_round(self, reason: str) -> None:
        """Make the next round start cold."""
        self._cold.next_round = Cold(ColdReason.AFTER_A_FAILURE, reason)

    def round_started(self) -> list[int]:
        """Replace the standbys that a round's workers have taken, once all have started; return the pids of those taken."""
        self._cold.next_round = None
        self._thread.round_started()
        released, self._released = self._released, []
        return released

    def learn(self, path: str) -> None:
        """Learn which modules a worker has imported, if it has written a report to `path`. Only the first report counts."""
        if self._modules.learn(path):
            self._thread.wake()

    def close(self) -> None:
        """End the server and all waiting standbys."""
        self._thread.close()
